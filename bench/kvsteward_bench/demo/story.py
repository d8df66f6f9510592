"""The story: Cold, Shadow, Canary, Full, the kill switch under load, and back, with two tenants who send the same text.

Every claim is checked as it is told; the first that isn't seen ends the story with a sentence.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ..traffic import Answer, Load, ask, session
from .site import Site, Tenant

STAGES = ("Cold", "Shadow", "Canary", "Full")
SESSIONS = 12
STREAMS = 8
DOCUMENT_LINES = 40


class NotSeen(Exception):
    """Something that the story claims did not happen."""


@dataclass(slots=True)
class Row:
    """What one stage did with the same document, sent twice by one tenant and then by another."""

    stage: str
    effect_seconds: float
    eligible: int
    reused: int
    first_ttft: float
    again_ttft: float
    other_tenant_reused: int
    note: str = ""


@dataclass(slots=True)
class Story:
    site: Site
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    turn: int = 0

    async def tell(self) -> None:
        started_as = await self.site.processes()
        for stage in STAGES:
            self.rows.append(await self._stage(stage))
        switch = await self._kill_switch()
        await self._release()
        see(await self.site.processes() == started_as, "a pod or process was restarted by an edit")
        self.say("no pod was restarted by any of these edits")
        await self.site.show()
        self._table(switch)

    async def _stage(self, stage: str) -> Row:
        percent = 50 if stage == "Canary" else 0
        begun = time.monotonic()
        # Nobody is protected: a request that is drawn into that group would neither reuse nor be predicted to.
        await self.site.edit({"stage": stage, "canary": {"percent": percent}, "protectedPercent": 0})
        await until(lambda: self._is(stage), f"stage {stage} was not in force everywhere", 30)
        effect = time.monotonic() - begun
        self.say(f"stage {stage}: in force on every replica {effect:.1f} s after the edit")
        if stage == "Canary":
            return await self._canary(effect)
        acme, globex = self.site.tenants
        first, again, other = await self._same_text(acme, globex)
        receipts = {receipt["id"]: receipt for receipt in await self.site.receipts()}
        see(all(answer.receipt in receipts for answer in (first, again, other)), "an answer has no receipt")
        eligible = receipts[again.receipt]["eligibleTokens"]
        row = Row(stage, effect, eligible, again.cached_tokens, first.ttft, again.ttft, other.cached_tokens)
        see(first.text == again.text == other.text, f"stage {stage}: the same question got different answers")
        see(first.cached_tokens == 0 and other.cached_tokens == 0, f"stage {stage}: another tenant's state was used")
        if stage == "Full":
            see(again.cached_tokens > 0, "stage Full: nothing was reused")
            self.say(f"  {acme.name} asked twice: {again.cached_tokens} of {again.prompt_tokens} tokens reused, "
                     f"first token after {again.ttft:.2f} s instead of {first.ttft:.2f} s, same answer")  # fmt: skip
        else:
            see(again.cached_tokens == 0, f"stage {stage}: something was reused")
            predicted = f"{eligible} tokens would have been" if eligible else "nothing was even predicted to be"
            see((eligible > 0) == (stage == "Shadow"), f"stage {stage}: {eligible} tokens were predicted")
            self.say(f"  {acme.name} asked twice: nothing reused, {predicted}")
        self.say(f"  {globex.name} sent the very same text: 0 tokens reused")
        return row

    async def _is(self, stage: str) -> bool:
        return await self.site.stage() == stage

    async def _same_text(self, acme: Tenant, globex: Tenant) -> tuple[Answer, Answer, Answer]:
        """One document, sent twice by acme and once by globex, all in one session so that all meet one replica.

        The third answer follows a prime of its own, so that its zero is not for want of anything to reuse."""
        self.turn += 1
        prompt = document(f"stage {self.turn}")
        async with session(connections=1) as client:
            answers = [
                await ask(client, self.site.url, prompt, model=self.site.model, key=tenant.key, max_tokens=16)
                for tenant in (acme, acme, globex)
            ]
        for answer in answers:
            see(answer.complete, f"a request failed: {answer.status} {answer.error or answer.raw[:200]!r}")
        return answers[0], answers[1], answers[2]

    async def _canary(self, effect: float) -> Row:
        """Half of all sessions reuse; a session stays on its side."""
        acme, globex = self.site.tenants
        reused: list[Answer] = []
        last: tuple[Answer, Answer] | None = None
        for number in range(SESSIONS):
            name = {"X-KV-Session": f"conversation-{number}"}
            prompt = document(f"canary {number}")
            async with session(connections=1) as client:
                pair = [
                    await ask(client, self.site.url, prompt, model=self.site.model, key=acme.key, max_tokens=4,
                              headers=name)
                    for _ in range(2)
                ]  # fmt: skip
                other = await ask(client, self.site.url, prompt, model=self.site.model, key=globex.key, max_tokens=4,
                                  headers=name)  # fmt: skip
            see(all(answer.complete for answer in (*pair, other)), "a request failed in the canary")
            see(other.cached_tokens == 0, "stage Canary: another tenant's state was used")
            if pair[1].cached_tokens:
                reused.append(pair[1])
                last = (pair[0], pair[1])
        see(0 < len(reused) < SESSIONS, f"stage Canary: {len(reused)} of {SESSIONS} sessions reused, not some of them")
        self.say(f"  {len(reused)} of {SESSIONS} conversations are in the canary and reuse; the rest run cold")
        if last is None:
            raise NotSeen("stage Canary: nothing was reused")
        first, again = last
        return Row("Canary", effect, again.cached_tokens, again.cached_tokens, first.ttft, again.ttft, 0,
                   f"{len(reused)} of {SESSIONS} sessions")  # fmt: skip

    async def _kill_switch(self) -> str:
        acme, globex = self.site.tenants
        shared = document("under load")
        load = Load(self.site.url, model=self.site.model, streams=STREAMS, prompts=lambda client, turn: shared,
                    keys=[acme.key, globex.key], max_tokens=8)  # fmt: skip
        async with load.running():
            await load.wait_for(2 * STREAMS)
            see(any(answer.cached_tokens for answer in load.answers), "nothing was reused under load")
            before = time.time()
            await self.site.edit({"killSwitch": "Engaged"})
            await until(self.site.cold, "the cold path was not confirmed by every replica", 30)
            confirmed = time.time()
            last = await self.site.last_match()
            see(last <= confirmed, "a match was made after the cold path was confirmed")
            await load.wait_for(2 * STREAMS)
            see(await self.site.last_match() == last, "a match was made after the cold path was confirmed")
        failed = [answer for answer in load.answers if not answer.complete]
        see(not failed, f"{len(failed)} requests failed while the kill switch was pulled")
        late = [answer for answer in load.answers if answer.started > confirmed and answer.cached_tokens]
        see(not late, "a request that began after the cold path was confirmed reused pages")
        after = max(0.0, last - before)
        self.say(f"kill switch with {STREAMS} streams running: last new match {after:.2f} s after the edit began, "
                 f"every replica confirmed after {confirmed - before:.2f} s, 0 of {len(load.answers)} requests failed")
        return f"{after:.2f} s to the last new match, 0 of {len(load.answers)} requests failed"

    async def _release(self) -> None:
        await self.site.edit({"killSwitch": "Released"})
        await until(self._warm, "nothing was reused after the switch was released", 60)
        self.say("kill switch released: reuse is back")

    async def _warm(self) -> bool:
        acme, globex = self.site.tenants
        _, again, other = await self._same_text(acme, globex)
        see(other.cached_tokens == 0, "another tenant's state was used")
        return again.cached_tokens > 0

    def _table(self, switch: str) -> None:
        head = ("stage", "effect", "eligible", "reused", "TTFT cold", "TTFT again", "other tenant reused", "")
        lines = [head] + [
            (row.stage, f"{row.effect_seconds:.1f} s", str(row.eligible), str(row.reused), f"{row.first_ttft:.2f} s",
             f"{row.again_ttft:.2f} s", str(row.other_tenant_reused), row.note)
            for row in self.rows
        ]  # fmt: skip
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        print()
        for line in lines:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        print(f"\n  kill switch: {switch}\n  cross-tenant reuse: 0 tokens", flush=True)


def see(happened: bool, otherwise: str) -> None:
    if not happened:
        raise NotSeen(otherwise)


async def until(true: Callable[[], Awaitable[bool]], otherwise: str, timeout: float) -> None:
    """Ask again until it is so; NotSeen after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not await true():
        if time.monotonic() > end:
            raise NotSeen(f"{otherwise} within {timeout:.0f} s")
        await asyncio.sleep(0.1)


def document(name: str) -> list[dict[str, str]]:
    """A chat about a document of some 900 tokens, that no other name's document shares a page with."""
    lines = "\n".join(
        f"Paragraph {number} of {name}: the archive keeps ledger {number * 37 % 101} beside ledger {number * 53 % 97}."
        for number in range(DOCUMENT_LINES)
    )
    return [
        {"role": "system", "content": f"{name}. You answer from this document.\n{lines}"},
        {"role": "user", "content": "What is the capital of France? Answer in one short sentence."},
    ]
