"""All that the engine keeps of one request beside its sequence: pages held, what matched, and when things happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvsteward_contract.directive import MissReason, Mode

from kvsteward_engine.block_manager import Holding
from kvsteward_engine.keychain import KeyChain
from kvsteward_engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Request:
    """Times are seconds of the engine's clock; page and token counts are of the first admission that looked anything
    up, which is the one the client waited for."""

    sequence: Sequence
    queue: str
    holding: Holding
    shadow: Holding = field(default_factory=lambda: Holding([]))
    shadow_lost: bool = False  # the index had no room to mirror this request: it predicts nothing more for it
    chain: KeyChain | None = None
    stop: Callable[[int], bool] | None = None  # shown each new token; True: the answer ends with it
    mode: Mode = Mode.COLD  # in force since the latest admission
    planned: int = 0  # positions computed or in the step being run
    offered: int = 0  # complete pages that were published, or may not be
    cancelled: bool = False
    # ---- for the outcome
    reported_mode: Mode = Mode.COLD
    epoch: int = 0
    looked_up: bool = False
    eligible: int = 0
    resident: int = 0
    reused: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)
    stored: int = 0
    peak: int = 0
    preemptions: int = 0
    violation: bool = False
    admitted: float | None = None
    first_token: float | None = None

    @property
    def id(self) -> str:
        """The request's id, unique among those in the engine."""
        return self.sequence.id
