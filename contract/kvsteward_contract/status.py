"""The status of a KVCachePolicy, as the operator writes it and people read it."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .policy import Stage

CONDITIONS = ("Accepted", "Available", "Progressing", "Promoted", "ColdPath", "Degraded", "Ready")
HISTORY_ENTRIES = 10

Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class _Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A piece of the status: written by one operator and perhaps read by an older one, so unknown fields are let be."""


class Condition(_Part, frozen=True):
    type: str
    status: Annotated[str, Meta(pattern="^(True|False|Unknown)$")]
    reason: str
    message: str
    last_transition_time: Time
    observed_generation: int


class Capacity(_Part, frozen=True):
    bytes_per_token: int = 0
    pool_tokens: int = 0


class GenerationStatus(_Part, frozen=True):
    name: str
    model_revision: str = ""
    image: str = ""
    policy_version: str = ""
    state: Annotated[str, Meta(description="Starting, Serving, Draining or Gone.")] = ""
    stage: Stage | None = None
    canary_percent: int = 0
    replicas: int = 0
    acknowledged_replicas: Annotated[
        int, Meta(description="Pods whose engine has confirmed the policy version.")
    ] = 0
    in_flight: int = 0
    resident_pages: int = 0


class Evidence(_Part, frozen=True):
    samples: int = 0
    cold_ttft_p95_milliseconds: Annotated[int | None, Meta(description="Protected requests, last window.")] = None
    eligible_tokens: int = 0
    reused_tokens: int = 0
    reused_percent: int | None = None
    window_end: Time | None = None


class HistoryEntry(_Part, frozen=True):
    sequence: int
    time: Time
    to: str
    reason: str
    from_: Annotated[str, Meta(description="The stage before; empty for the first.")] = msgspec.field(
        name="from", default=""
    )


class PolicyStatus(_Part, frozen=True):
    observed_generation: int = 0
    endpoint: Annotated[str, Meta(description="URL of the policy's Service.")] = ""
    selector: Annotated[str, Meta(description="Label selector of the policy's pods, for autoscalers.")] = ""
    stage: Annotated[Stage | None, Meta(description="In force now, in the serving generation.")] = None
    canary_percent: int = 0
    replicas: int = 0
    image: Annotated[str, Meta(description="Engine image pinned at acceptance.")] = ""
    capacity: Capacity = Capacity()
    generations: Annotated[tuple[GenerationStatus, ...], Meta(max_length=16)] = ()
    evidence: Evidence = Evidence()
    history: Annotated[tuple[HistoryEntry, ...], Meta(max_length=HISTORY_ENTRIES)] = ()
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=16)] = ()
