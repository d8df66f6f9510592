"""The `kvsteward-engine` command: `serve` runs an engine, `drain` is the pod's preStop hook.

Imports nothing heavy: `drain` must be quick, and `serve` should refuse bad flags before it loads torch.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from kvsteward_contract.quantity import parse_quantity
from kvsteward_contract.wire import DRAIN_PORT, ENGINE_PORT

USAGE_ERROR = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One sentence, not the whole usage."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the engine failed while it ran, 2 it can't start as asked (one sentence on stderr)."""
    asked = make_parser().parse_args(arguments)
    if asked.command == "drain":
        from kvsteward_engine.drain import drain

        return _report(drain(asked.url, asked.seconds))
    from kvsteward_engine.errors import StartError
    from kvsteward_engine.serve import serve

    try:
        return serve(asked, functools.partial(print, flush=True))
    except StartError as error:
        print(f"kvsteward-engine: {error}", file=sys.stderr)
        return USAGE_ERROR


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = _Parser(prog="kvsteward-engine", description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve|drain")
    serve = commands.add_parser("serve", help="load a model and serve it", allow_abbrev=False)
    model = serve.add_argument_group("model")
    model.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face checkpoint, or a .gguf file")
    model.add_argument("--served-model-name", default="", help="name clients send (default: the folder's)")
    model.add_argument("--model-revision", default="", help="part of every page's identity")
    model.add_argument("--tokenizer-revision", default="", help="part of every page's identity")
    model.add_argument(
        "--dtype", choices=("Auto", "BF16", "FP16", "FP32"), default="Auto", help="(default: the checkpoint's)"
    )
    model.add_argument("--max-tokens", type=_positive, default=None, help="context served (default: the model's)")
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    model.add_argument("--threads", type=_positive, default=None, help="CPU threads (default: CPUs it may use)")
    model.add_argument("--deterministic", action="store_true", help="same bits whatever else is in the batch")
    cache = serve.add_argument_group("cache and queue")
    cache.add_argument("--capacity", type=_size, default="2Gi", help="bytes for pages, such as 8Gi (default 2Gi)")
    cache.add_argument("--block-tokens", type=_positive, default=16, help="tokens a page (default 16)")
    cache.add_argument("--max-concurrent", type=_positive, default=64, help="running sequences (default 64)")
    cache.add_argument("--max-waiting", type=_natural, default=256, help="queued requests; more get 429 (default 256)")
    cache.add_argument("--prefill-chunk", type=_positive, default=512, help="tokens a step (default 512)")
    http = serve.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1")
    http.add_argument("--port", type=_port, default=ENGINE_PORT, help="0: one that is free; it is printed")
    http.add_argument("--token-file", type=Path, default=None, help="bearer token that every route but /health wants")
    http.add_argument("--drain-seconds", type=_natural, default=120, help="for what runs at SIGTERM (default 120)")
    drain = commands.add_parser("drain", help="ask the sidecar to drain, and wait until it has", allow_abbrev=False)
    drain.add_argument("--url", default=f"http://127.0.0.1:{DRAIN_PORT}", help="the sidecar's drain port")
    drain.add_argument("--seconds", type=_natural, default=120, help="longest wait (default 120)")
    return parser


def _report(failure: str | None) -> int:
    if failure is None:
        return 0
    print(f"kvsteward-engine: {failure}", file=sys.stderr)
    return 1


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if (number := _natural(text)) < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def _port(text: str) -> int:
    if (number := _natural(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return number


def _size(text: str) -> int:
    try:
        return parse_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
