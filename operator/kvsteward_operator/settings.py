"""What the operator was started with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESYNC_SECONDS = 60.0  # list everything and compare with the index
SECRET_SECONDS = 30.0  # how long a deleted Secret stays away
FAST_SCRAPE_SECONDS = 1.0  # until acknowledged
SLOW_SCRAPE_SECONDS = 10.0
WINDOW_SECONDS = 60.0  # one window of evidence


@dataclass(frozen=True, slots=True)
class Settings:
    """`namespaces` empty: the whole cluster. Peers are NetworkPolicyPeer objects that may reach the admin port."""

    engine_image: str
    sidecar_image: str
    operator_key: bytes = field(repr=False)
    namespaces: tuple[str, ...] = ()
    admin_peers: tuple[Mapping[str, Any], ...] = ()
