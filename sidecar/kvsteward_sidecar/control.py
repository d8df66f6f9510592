"""What the traffic side asks and tells: may this request reuse, what happened to it.

`Control` is the one seam between the request path (routes, body, tenants, upstream, proxy) and everything that
governs it (permission, engine link, latch, receipts, telemetry, drain). Nothing here awaits on a request's way in or
out: `admit` and `finish` are plain calls on precomputed state.

The order a request must keep, with no await between 1 and 3:

1. `permission = control.permission`     one snapshot; it carries the epoch its decisions are made under
2. `decision = decide(facts)`            facts made from that snapshot, `control.grant(...)` and `control.bucket(...)`
3. `ticket = control.admit(...)`         the Directive in the ticket has the snapshot's epoch, so a permission that was
                                         lost meanwhile can't be used: the engine runs another epoch's Directive cold
4. `control.finish(ticket, ...)`         exactly once, whatever happened
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import aiohttp
from kvsteward_contract.cohort import bucket as cohort_bucket
from kvsteward_contract.decision import Decision, Reason
from kvsteward_contract.directive import Directive, EnginePolicy, EngineState, Mode, Outcome, encode
from kvsteward_contract.identity import (
    COHORT_PURPOSE,
    OUTPUT_PURPOSE,
    TENANT_PURPOSE,
    derived_key,
    opaque_digest,
    scope_salt,
)
from kvsteward_contract.observation import OBSERVATION_VERSION, Observation
from kvsteward_contract.observation import Latch as ObservedLatch

from .drain import CLOSING_SECONDS, Drain, Phase
from .engine_link import EngineAddress, EngineLink
from .latch import OPERATOR_REASON, VIOLATION_REASON, Latch, LatchFile, seen_attempt
from .permission import Permission, losses, permission_for, succeed
from .policy_source import PolicyState
from .receipts import Receipts, receipt_of
from .telemetry import Exposition, Now, Telemetry
from .tenants import TenantFiles, Tenants
from .ticket import PRIVATE_KIND, Arrival, Ending, Grant, Refusal, Ticket

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
MAX_GRANTS = 10_000  # tenants named by a gateway are not bounded by a file
RETRY_AFTER = 2  # seconds


_DRAINING = Refusal(503, "draining", "this replica is going away; send the request again", 1)
_NOT_READY = Refusal(503, "engine_not_ready", "the engine of this replica is not ready; try again shortly", RETRY_AFTER)


class Control:
    """The seam. Attributes are read by the traffic side and replaced (never changed in place) by the control side."""

    permission: Permission
    tenants: Tenants

    def __init__(
        self,
        session: aiohttp.ClientSession,
        address: EngineAddress,
        salt: bytes,
        tenant_files: TenantFiles,
        latch_file: LatchFile,
        receipts: Receipts,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        closing_seconds: float = CLOSING_SECONDS,
    ) -> None:
        self.clock, self.started = clock, clock()
        self.policy = PolicyState(self.refresh, monotonic)
        self.link = EngineLink(session, address, self._engine_epoch, self._engine_state, clock=monotonic)
        self.receipts, self.telemetry = receipts, Telemetry()
        self.exposition = Exposition(self.telemetry)
        self.drain = Drain(lambda: self.in_flight, closing_seconds)
        self.in_flight = 0
        self._salt, self._tenant_files, self._latch_file = salt, tenant_files, latch_file
        self._cohort_seed = derived_key(salt, COHORT_PURPOSE)
        self._tenant_key = derived_key(salt, TENANT_PURPOSE)
        self._output_key = derived_key(salt, OUTPUT_PURPOSE).hex()
        self._grants: dict[str, Grant] = {}
        self._fetching: set[asyncio.Task[None]] = set()
        self._latch_problem = ""
        self._violations = 0  # the engine's, as far as this pod's latch answers them
        self.latch = latch_file.load(self.started)
        tenant_files.refresh()
        self.tenants = tenant_files.tenants
        self.permission = self._permission()

    # The traffic side's questions.

    def grant(self, tenant: str) -> Grant:
        """The tenant's opaque scope, salt and retention class under the policy in force."""
        if (known := self._grants.get(tenant)) is not None:
            return known
        permission = self.permission
        digest = opaque_digest(self._tenant_key, tenant)
        grant = Grant(
            digest,
            scope_salt(self._salt, PRIVATE_KIND, permission.namespace, permission.uid, tenant).hex(),
            f"{PRIVATE_KIND}/{digest}",
            permission.retention_class(tenant),
        )
        if len(self._grants) >= MAX_GRANTS:
            self._grants.clear()
        self._grants[tenant] = grant
        return grant

    def bucket(self, session: str) -> int:
        """Cohort bucket in [0, 10000) of a session id (X-KV-Session, else OpenAI `user`, else the request id)."""
        return cohort_bucket(self._cohort_seed, session)

    def engine_ready(self) -> bool:
        """True while the engine answers and has its model loaded."""
        return self.link.ready

    def refusal(self, promised: bool = False) -> Refusal | None:
        """Not None: answer so at once (the engine isn't ready, or the drain's second phase has begun). `promised`: the
        connection's last answer began before the drain and said that it goes on; such a client is still served."""
        if self.drain.phase is Phase.DRAINED or (self.drain.phase is Phase.REFUSING and not promised):
            return _DRAINING
        return None if self.link.ready else _NOT_READY

    def closing(self) -> bool:
        """True from the start of a drain: answers carry `Connection: close`."""
        return self.drain.phase is not Phase.SERVING

    def dropped(self, field: str, count: int = 1) -> None:
        """Counts what a client sent that was dropped. `field` is one of a fixed, small set of names."""
        self.telemetry.dropped[field] += count

    def admit(self, request: str, decision: Decision, arrival: Arrival) -> Ticket:
        """Takes the request into account as in flight and makes its Directive."""
        permission, grant, mode = arrival.permission, arrival.grant, decision.mode
        warm = mode is not Mode.COLD and grant is not None
        directive = Directive(
            request=request,
            mode=mode if warm else Mode.COLD,
            epoch=permission.epoch,
            namespace=grant.namespace if warm and grant else "",
            scope=grant.scope if warm and grant else "",
            retention=grant.retention if grant else "",
            version=permission.version,
            queue=grant.digest if grant else "",
        )
        self.in_flight += 1
        self.telemetry.request(decision.reason.value, arrival.workload, permission.stage.value)
        return Ticket(request, decision, arrival, encode(directive), self.clock())

    def finish(self, ticket: Ticket, outcome: Outcome | None, ttft: float | None, ending: Ending) -> str:
        """Ends the request: in-flight count, metrics, receipt. Returns the receipt id. A second call raises.

        `ttft`: seconds from arrival to the first byte of content, None when none came. `outcome` None with CANCELLED
        or FAILED: the control side asks the engine for it and writes the receipt when it has an answer.
        """
        if ticket.finished:
            raise RuntimeError(f"request {ticket.request} was finished twice")
        ticket.finished = True
        self.in_flight -= 1
        if self.in_flight == 0:
            self.drain.settled()
        if outcome is None and ending in (Ending.CANCELLED, Ending.FAILED):
            task = asyncio.get_running_loop().create_task(self._finish_later(ticket, ttft, ending))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        else:
            self._record(ticket, outcome, ttft, ending)
        return ticket.request

    # The control side's own.

    def refresh(self) -> None:
        """Makes the permission anew; a change is in force on return, and on its way to the engine."""
        document = self.policy.document
        self._tenant_files.refresh(document.identity.source if document is not None else None)
        self.tenants = self._tenant_files.tenants
        if document is not None:
            self._keep_latch(seen_attempt(self.latch, document.rollout.attempt))
        old = self.permission
        new = succeed(old, self._permission())
        if new == old:
            return
        lost = losses(old, new)
        if (old.uid, old.namespace, old.overrides) != (new.uid, new.namespace, new.overrides):
            self._grants = {}
        self.permission = new
        self._push()
        if lost:
            log.warning("permission lost (%s): epoch %d", ", ".join(lost), new.epoch)

    def hold_cold(self, reason: str = OPERATOR_REASON) -> None:
        """Latches this pod on the cold path. A latch that is already there stays as it is."""
        if self.latch is None:
            attempt = self.policy.document.rollout.attempt if self.policy.document is not None else None
            log.warning("held on the cold path: %s", reason)
            self._keep_latch(Latch(reason, self.clock(), attempt))
            self.refresh()

    def release(self) -> None:
        """Releases this pod's latch, if there is one."""
        if self.latch is not None:
            log.warning("released from the cold path")
            self._keep_latch(None)
            self.refresh()

    async def run(self) -> None:
        """What has to be looked at every second: the engine, the tenants' files, the engine's counters."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run())
            group.create_task(self._tick())

    async def settle(self) -> None:
        """Waits for the receipts of requests that were cut, then writes out what is left."""
        if self._fetching:
            await asyncio.wait(self._fetching, timeout=1.0)
        self.receipts.close()

    def metrics(self) -> bytes:
        """The Prometheus text format."""
        return self.exposition.render(
            Now(
                self.in_flight,
                self.policy.age(),
                self.permission.version,
                self.permission.stage.value,
                {(kind, "device"): pages for kind, pages in self._resident_pages().items()},
            )
        )

    def problems(self) -> tuple[str, ...]:
        """Sentences for people, each behind a CamelCase reason."""
        found = [*self.policy.problems]
        if self._tenant_files.problem:
            found.append(f"IdentityUnavailable: {self._tenant_files.problem}")
        if self._latch_problem:
            found.append(self._latch_problem)
        if self.receipts.unwritten_dropped:
            found.append(f"ReceiptsDropped: {self.receipts.unwritten_dropped} receipts could not be written to stdout")
        return tuple(found)

    def observation(self) -> Observation:
        permission, link, latch = self.permission, self.link, self.latch
        state, confirmed = link.state, link.confirmed
        alive = state is not None and confirmed is not None and state.instance == confirmed.instance
        return Observation(
            api_version=OBSERVATION_VERSION,
            start_time=self.started,
            time=self.clock(),
            generation=permission.generation,
            policy_version=permission.version,
            acknowledged_version=confirmed.version if alive and confirmed else "",
            stage=permission.stage,
            canary_percent=permission.canary_percent,
            attempt=permission.attempt,
            cold_requested=permission.stopped,
            cold_confirmed=permission.stopped and link.acknowledged,
            epoch=permission.epoch,
            engine_epoch=confirmed.epoch if alive and confirmed else 0,
            engine_instance=state.instance if state else "",
            last_match_seconds=state.last_match_seconds if state else 0.0,
            in_flight=self.in_flight,
            resident_pages=sum(self._resident_pages().values()),
            bytes_per_token=state.bytes_per_token if state else 0,
            pool_tokens=state.pool_tokens if state else 0,
            policy_age_seconds=self.policy.age(),
            resource_generation=self.policy.resource.generation if self.policy.resource else 0,
            latch=ObservedLatch(latch.reason, latch.attempt or 0, latch.since) if latch else None,
            problems=self.problems(),
            counters=self.telemetry.observed_counters(),
            histograms=self.telemetry.observed_histograms(),
        )

    def _permission(self) -> Permission:
        policy = self.policy
        return permission_for(
            policy.document, policy.version, policy.resource, self.latch, _credentials(self.tenants), self._tenant_key
        )

    def _engine_epoch(self, epoch: int) -> None:
        """The engine is at this epoch: go past it, whatever was decided before."""
        self.permission = replace(self.permission, epoch=max(epoch, self.permission.epoch) + 1)
        self._push()

    def _engine_state(self, state: EngineState) -> None:
        """A latched engine found a scope violation that no sidecar has answered yet. The latch becomes this pod's,
        which outlives both processes, and the engine is told so, which ends its own."""
        self._violations = state.violations
        if state.latched:
            self.hold_cold(VIOLATION_REASON)
            self._push()

    def _push(self) -> None:
        permission = self.permission
        if permission.epoch:
            retention = dict(permission.retention)
            self.link.want(
                EnginePolicy(permission.epoch, permission.version, retention, self._output_key, self._violations)
            )

    def _keep_latch(self, latch: Latch | None) -> None:
        if latch == self.latch:
            return
        self.latch = latch
        try:
            self._latch_file.store(latch)
            self._latch_problem = ""
        except OSError as error:
            self._latch_problem = f"LatchUnwritable: {self._latch_file.path}: {error.strerror}; a restart would lose it"
            log.error("%s", self._latch_problem)

    async def _tick(self) -> None:
        while True:
            self.refresh()
            if self.link.ready:
                await self.link.refresh_stats()
                if self.link.state is not None:
                    self.telemetry.engine_counters(self.link.state.instance, self.link.stats)
            await asyncio.sleep(TICK_SECONDS)

    def _resident_pages(self) -> dict[str, int]:
        return dict(self.link.stats.get("residentPages") or {})

    async def _finish_later(self, ticket: Ticket, ttft: float | None, ending: Ending) -> None:
        self._record(ticket, await self.link.outcome(ticket.request), ttft, ending)

    def _record(self, ticket: Ticket, outcome: Outcome | None, ttft: float | None, ending: Ending) -> None:
        arrival, decision = ticket.arrival, ticket.decision
        permission = arrival.permission
        scope_kind = arrival.scope_kind
        if outcome is not None:
            if outcome.scope_violation:
                self.hold_cold(VIOLATION_REASON)
            self.telemetry.outcome(outcome, scope_kind, permission.generation)
            if ttft is not None:
                self.telemetry.first_token(
                    ttft,
                    _path(decision, outcome),
                    arrival.workload,
                    outcome.prompt_tokens,
                    scope_kind,
                    permission.generation,
                )
        self.receipts.add(receipt_of(ticket, outcome, ttft, ending))


def _path(decision: Decision, outcome: Outcome) -> str:
    """The label `path`: what the engine did, with the protected group apart."""
    return "protected" if decision.reason is Reason.PROTECTED else outcome.mode.value.lower()


def _credentials(tenants: Tenants) -> frozenset[str]:
    """One word for each credential and whom it names: a vanished one is a loss of permission."""
    keys = {f"{digest.hex()}={tenant}" for digest, tenant in tenants.keys.items()}
    return frozenset(keys | {digest.hex() for digest in tenants.gateway})
