"""The command line of `kubectl kvcache NAME` and `kvsteward cluster NAME`: the same commands under two names."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable

from kvsteward_cli.errors import CommandFailed

PLUGIN = "kubectl kvcache"
PURPOSE = "KVCachePolicies on a cluster: see them, steer them."
CONFIRM_SECONDS = 5.0
MAX_RECEIPTS = 4096  # what a sidecar keeps


def main(arguments: list[str] | None = None) -> int:
    """The plugin. Exit status: 0 done, 1 not confirmed, not found or broken, 2 it can't be done as asked."""
    parser = argparse.ArgumentParser(prog=PLUGIN, description=PURPOSE, parents=[shared()])
    add_commands(parser)
    return finish(PLUGIN, lambda: execute(parser.parse_args(arguments)))


def finish(name: str, run: Callable[[], int]) -> int:
    """Runs it; what fails is one sentence on stderr and an exit status."""
    try:
        return run()
    except CommandFailed as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # a reader like `head` has seen enough; Python must not complain about it at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def shared() -> argparse.ArgumentParser:
    """Options that may stand before or after the command."""
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("-n", "--namespace", type=_object_name, help="of the policy; else the context's")
    common.add_argument("--context", help="of the kubeconfig; else its current one")
    common.add_argument("--kubeconfig", metavar="FILE", help="instead of KUBECONFIG or ~/.kube/config")
    common.add_argument("-o", "--output", choices=["table", "json"], help="json: for scripts")
    return common


def add_commands(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    common = shared()

    def verb(name: str, help_: str, *, one: bool = True) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help_, description=help_, parents=[common])
        made.add_argument(
            "name", metavar="NAME", type=_object_name, nargs=None if one else "?", help="of the KVCachePolicy"
        )
        return made

    status = verb("status", "stage, generations, conditions and evidence of one policy, or a line for each", one=False)
    status.add_argument("-w", "--watch", action="store_true", help="go on, and show what changes")
    status.add_argument("-A", "--all-namespaces", action="store_true", help="without NAME: policies of all namespaces")

    receipts = verb("receipts", "the newest cache decisions of all pods")
    receipts.add_argument("--limit", type=_number(1, MAX_RECEIPTS), default=20, help="(%(default)s)")
    receipts.add_argument("--id", type=_receipt_id, help="one in full: the value of the answer's header X-KV-Receipt")

    ledger = verb("ledger", "pages of cached state in all pods, those used last first")
    ledger.add_argument("--limit", type=_number(1, 1_000_000), default=20, help="(%(default)s)")
    ledger.add_argument("--evicted", action="store_true", help="also pages that were evicted lately")

    verb("pause", "hold the rollout: a raise of stage or canary waits, a lowering acts")
    verb("resume", "let a paused rollout go on")

    kill = verb("kill", "engage the kill switch: no new match from now on, what runs finishes")
    kill.add_argument("--wait", action="store_true", help="until every pod confirms; shows each one's last new match")
    kill.add_argument(
        "--timeout", type=_number(1, 3600), default=CONFIRM_SECONDS, metavar="SECONDS", help="of --wait (%(default)g)"
    )

    release = verb("release", "release the kill switch")
    release.add_argument("--latches", action="store_true", help="raise the attempt too, which releases latched pods")

    verb("promote", "raise the stage by one step (advance: Manual)")

    rollback = verb("rollback", "go back to an earlier accepted spec; says what changes")
    rollback.add_argument(
        "--to-revision", type=_number(1, 2**31), metavar="N", help="else the newest one that is different from the spec"
    )
    rollback.add_argument("--list", action="store_true", help="show the revisions kept, and change nothing")
    rollback.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")


def execute(given: argparse.Namespace) -> int:
    """Raises CommandFailed."""
    try:
        from . import api, edits, reads
    except ModuleNotFoundError as missing:
        raise CommandFailed(f"this needs {missing.name}: pip install 'kvsteward[cluster]'", 2) from None
    from .session import Session

    if given.verb == "status" and given.name and given.all_namespaces:
        raise CommandFailed("status takes a NAME or --all-namespaces, not both", 2)
    options = vars(given)
    cluster = api.connect(options.get("kubeconfig"), options.get("context"), options.get("namespace"))
    session = Session(cluster, json=options.get("output") == "json")
    commands = (
        reads.status, reads.receipts, reads.ledger, edits.pause, edits.resume, edits.kill, edits.release,
        edits.promote, edits.rollback,
    )  # fmt: skip
    command = next(one for one in commands if one.__name__ == given.verb)
    return command(session, given)


def _object_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} can't be the name of an object")
    return text


def _receipt_id(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z-]{1,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} can't be the id of a receipt")
    return text


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
