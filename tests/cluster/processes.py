"""The cluster's processes: recorded by pid and start time, so that a reused pid is never taken for one of them."""
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from place import STATE, Failure, say


def start_time(pid: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def present(name: str) -> int | None:
    """The pid of a recorded process, or None when it is gone or only a zombie."""
    try:
        pid, started = (STATE / "pids" / name).read_text().split()
        if start_time(pid) == started and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            return int(pid)
    except (OSError, ValueError):
        pass
    return None


def alive(name: str) -> int | None:
    """The pid of a recorded process, or None when it is gone or going (a dying init waits for all others)."""
    pid = present(name)
    return pid if pid and os.path.exists(f"/proc/{pid}/ns/net") else None


def background(name: str, argv: list[str], env: dict[str, str] | None = None, cwd: str | None = None) -> None:
    """Start argv, an unshare or nsenter that runs a program as its child in a pid namespace. Record that child's
    pid, as the host sees it, and let the parent, which would only wait, go."""
    with open(STATE / "logs" / f"{name}.log", "ab") as log:
        parent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                  env=env, cwd=cwd)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while parent.poll() is None:
        if found := children.read_text().split():
            (STATE / "pids" / name).write_text(f"{found[0]} {start_time(found[0])}\n")
            parent.kill()
            parent.wait()
            return
        time.sleep(0.01)
    raise broken(name, "did not start")


def broken(name: str, what: str) -> Failure:
    log = STATE / "logs" / f"{name}.log"
    tail = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
    return Failure(f"{name} {what}; its log is {log}" + "".join(f"\n  {line[:300]}" for line in tail))


def wait(what: str, ready: Callable[[], object], *components: str, timeout: float = 60) -> None:
    """Wait until ready(); fail at once if one of the components has died."""
    begun = time.monotonic()
    while not ready():
        for name in components:
            if not alive(name):
                raise broken(name, "died")
        if time.monotonic() - begun > timeout:
            raise broken(components[-1], f"is up, but {what} was not ready after {timeout} s")
        time.sleep(0.1)
    say(f"{what} ready after {time.monotonic() - begun:.1f} s")


def enter(*argv: object) -> list[str]:
    """argv, in all of the cluster's namespaces; the pid namespace too, since /proc is its own.
    Not `ip netns exec`: that remounts /sys, and the cgroup mounts under it vanish."""
    return ["nsenter", "-t", str(_init()), "--mount", "--net", "--pid", "--", *(str(word) for word in argv)]


def in_network(*argv: str) -> list[str]:
    """argv, in the cluster's network only: the command keeps its pid, so that ending it works as usual."""
    return ["nsenter", f"--net=/proc/{_init()}/ns/net", "--", *argv]


def _init() -> int:
    if pid := alive("init"):
        return pid
    raise Failure("the cluster is not up; run: make cluster-up")
