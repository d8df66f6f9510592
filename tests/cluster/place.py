"""Where a cluster lives, its addresses, and running a command. Standard library only, like all of this folder: it
works before any virtual environment exists."""
import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KIT = Path(__file__).resolve().parent
STATE = Path(os.environ.get("CLUSTER_STATE") or KIT.parents[1] / ".e2e").absolute()
CACHE = Path(os.environ.get("CLUSTER_CACHE") or Path("~/.cache/kvsteward/cluster").expanduser()).absolute()
NAME = "kvsteward-" + hashlib.sha256(str(STATE).encode()).hexdigest()[:8]  # of its cgroups
MARK = STATE / "cluster.json"  # only a folder with this file in it is ever removed
KUBECONFIG = STATE / "kubeconfig"

NODE, NODE_IP, POD_NET = "node1", "10.99.0.1", "10.244.0.0/24"
SERVICE_NET, API_IP = "10.96.0.0/16", "10.96.0.1"
PAUSE = "localhost/kvsteward-pause:1"


class Failure(Exception):
    """Something the user has to see to; its text is all they get."""


def say(text: str) -> None:
    print(f"cluster: {text}", flush=True)


@contextmanager
def locked() -> Iterator[None]:
    """One command at a time on this machine, whichever cluster it is for: they share binaries and images."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*argv: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """What a command prints; raises Failure with that when it fails."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
                          cwd=cwd, check=False)
    if done.returncode:
        raise Failure(f"{shlex.join(words)} exited {done.returncode}:\n{done.stdout.strip()}")
    return done.stdout


def works(argv: list[str]) -> bool:
    """Whether a command succeeds, quietly."""
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
