"""The commands that only look: status, receipts, ledger."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

from kvsteward_cli.errors import CommandFailed

from . import records
from .answers import Answer, gather
from .api import NotFound, Object, Unreachable
from .session import Session
from .status import page, rows, view

WATCH_SECONDS = 1.0
LEDGER_SLICE = 1000  # pages a sidecar gives at once, at most
MAX_PAGES = 50_000  # of a pod that are read
LEDGER_SECONDS = 60.0
NO_RECEIPTS = "no receipts: nothing was asked since the sidecars started"
NO_PAGES = "no pages: nothing was published, or all of it has gone"
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def status(session: Session, given: Namespace) -> int:
    """One policy in full, or a line for each."""
    views = _views(session, given)
    if not given.watch:
        session.show(_text(session, given, views), views[0] if given.name else {"items": views})
        return 0
    shown: Any = None
    problem = ""
    while True:
        if session.json:
            if views != shown:
                print(json.dumps(views[0] if given.name else {"items": views}, ensure_ascii=False), flush=True)
        elif sys.stdout.isatty():  # ages go on, changed or not
            print(f"{CLEAR}{_text(session, given, views)}", flush=True)
        elif views != shown:
            print(f"{_text(session, given, views)}\n", flush=True)
        shown = views
        session.sleep(WATCH_SECONDS)
        try:
            views, problem = _views(session, given), ""
        except Unreachable as failure:  # goes on by itself; said once
            if str(failure) != problem:
                problem = str(failure)
                session.note(problem)


def _views(session: Session, given: Namespace) -> list[Object]:
    if given.name:
        return [view(session.cluster.policy(given.name))]
    return [view(one) for one in session.cluster.policies(everywhere=given.all_namespaces)]


def _text(session: Session, given: Namespace, views: list[Object]) -> str:
    if given.name:
        return page(views[0], session.clock())
    if not views:
        here = f" in namespace {session.cluster.namespace}; see -n and -A"
        return "no policies" + ("" if given.all_namespaces else here)
    return rows(views, session.clock(), namespaces=given.all_namespaces)


def receipts(session: Session, given: Namespace) -> int:
    """The newest receipts of all pods, or one by its id."""
    pods, token = session.sidecars(given.name), session.cluster.admin_token(given.name)
    if given.id:
        return _receipt(session, given, pods, token)
    answers = session.ask(pods, f"/v1/receipts?limit={given.limit}", token)
    found = records.merged(
        ((answer.pod, answer.body["receipts"]) for answer in answers if answer.body), given.limit, "time"
    )
    session.show(records.receipts(found) if found else NO_RECEIPTS, {"items": found})
    return _silent(given.name, [(answer.pod, answer.problem) for answer in answers if answer.problem])


def _receipt(session: Session, given: Namespace, pods: list[str], token: str) -> int:
    answers = session.ask(pods, f"/v1/receipts?id={given.id}", token)
    for answer in answers:
        if answer.body:
            found = {"pod": answer.pod, **answer.body}
            session.show(records.receipt(found), found)
            return 0
    told = "; ".join(f"{answer.pod}: {answer.problem}" for answer in answers)
    raise NotFound(f"no pod of {given.name} has receipt {given.id} ({told or 'no pod runs'})")


def ledger(session: Session, given: Namespace) -> int:
    """Pages of all pods, those used last first."""
    pods, token = session.sidecars(given.name), session.cluster.admin_token(given.name)
    answers = gather(pods, lambda pod: _pages(session, pod, token, evicted=given.evicted), LEDGER_SECONDS)
    whole = [(answer.pod, answer.body["pages"]) for answer in answers if answer.body]
    newest, total = records.merged(whole, given.limit, "lastUse"), sum(len(pages) for _, pages in whole)
    text = records.ledger(newest, session.clock()) if newest else NO_PAGES
    session.show(text, {"items": newest, "total": total})
    if total > len(newest) and not session.json:
        session.note(f"{len(newest)} of {total} pages, those used last; see --limit")
    for answer in answers:
        if answer.body and answer.body["more"]:
            session.note(f"{answer.pod} has more pages than the {MAX_PAGES} that were read")
    return _silent(given.name, [(answer.pod, answer.problem) for answer in answers if answer.problem])


def _pages(session: Session, pod: str, token: str, *, evicted: bool) -> Answer:
    """A pod's pages in slices, as one answer: `pages`, and whether there are `more` than were read."""
    pages: list[Object] = []
    cursor: str | None = ""
    while cursor is not None and len(pages) < MAX_PAGES:
        answer = session.answer(pod, f"/v1/ledger?limit={LEDGER_SLICE}&cursor={cursor}", token)
        if not answer.body:
            return answer
        pages += answer.body["pages"]
        cursor = answer.body["cursor"]
        if not evicted and pages and pages[-1]["state"] == "Evicted":  # they come last
            cursor = None
    return Answer(pod, {"pages": [one for one in pages if evicted or one["state"] != "Evicted"], "more": bool(cursor)})


def _silent(name: str, problems: list[tuple[str, str]]) -> int:
    if problems:
        told = "; ".join(f"{pod}: {problem}" for pod, problem in problems)
        raise CommandFailed(f"not all pods of {name} answered: {told}")
    return 0
