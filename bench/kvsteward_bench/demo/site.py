"""Where a story is told: what it may ask of a cluster, or of a laptop."""

from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    key: str


class Site(Protocol):
    """A policy in force somewhere, with an endpoint for its clients."""

    label: str  # what the story is told on, for the headline
    url: str  # the policy's endpoint
    model: str
    tenants: tuple[Tenant, Tenant]

    async def edit(self, rollout: Json) -> None:
        """Change fields of spec.rollout, as a person would."""

    async def stage(self) -> str:
        """The stage in force on every replica, or "" while they differ or have not confirmed."""

    async def cold(self) -> bool:
        """Whether every replica has confirmed that it makes no new match."""

    async def last_match(self) -> float:
        """Unix time of the last new match on any replica; 0 = none."""

    async def receipts(self) -> list[Json]:
        """The newest receipts of all replicas."""

    async def processes(self) -> frozenset[str]:
        """What identifies every serving process; changes when one is restarted."""

    async def show(self) -> None:
        """Print what a person would look at in the end."""
