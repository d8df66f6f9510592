"""Processes of our own: started, watched, ended by their own pids, and never left behind."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

KILL_SECONDS = 5.0  # after the time a child was given to end
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, linux/prctl.h


@dataclass(frozen=True, slots=True)
class Child:
    """A running child; `name` is what people are told it is."""

    name: str
    process: asyncio.subprocess.Process

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    async def stop(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL when it has not ended `seconds` later."""
        if self.ended:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), seconds + KILL_SECONDS)
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        if not self.ended:
            self.process.kill()


async def start(name: str, module: str, arguments: list[str], *, words_to_stderr: bool) -> Child:
    """A Python module as a child. A Ctrl-C in the terminal doesn't reach it, the end of its parent does.

    `words_to_stderr`: what it prints goes to stderr, for a child whose stdout is not ours to pass on.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr if words_to_stderr else None,
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )
    return Child(name, process)


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux, what makes a child end when this process is killed and can't end it any more."""
    if not sys.platform.startswith("linux"):
        return None
    control = ctypes.CDLL(None).prctl

    def arrange() -> None:
        control(_PARENT_DEATH_SIGNAL, signal.SIGTERM)

    return arrange
