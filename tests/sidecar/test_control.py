"""The seam: one snapshot decides a request, a loss reaches the engine at once, everything is accounted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvsteward_contract.decision import Decision, Facts, decide
from kvsteward_contract.directive import Directive, Mode, Outcome, decode_directive
from kvsteward_contract.document import canonical
from kvsteward_contract.identity import scope_salt
from kvsteward_contract.observation import decode_observation, encode_observation
from kvsteward_contract.policy import Stage
from kvsteward_sidecar import engine_link
from kvsteward_sidecar.control import Control
from kvsteward_sidecar.ticket import Arrival, Ending, Ticket
from support.control_plane import SALT, UID, PolicyEngine, admit, document, resource, running_control, until


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PolicyEngine]:
    monkeypatch.setattr(engine_link, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(engine_link, "RETRY_SECONDS", 0.02)
    fake = PolicyEngine()
    await fake.start()
    yield fake
    await fake.stop()


def directive(ticket: Ticket) -> Directive:
    return decode_directive(ticket.directive)


def outcome(ticket: Ticket, **fields: Any) -> Outcome:
    return Outcome(request=ticket.request, mode=directive(ticket).mode, epoch=directive(ticket).epoch, **fields)


async def in_full(control: Control) -> None:
    """Full for everyone, confirmed by the engine."""
    control.policy.take_document(canonical(document(stage="Full", protectedPercent=0)))
    control.policy.take_resource(resource(stage="Full"))
    await until(lambda: control.link.acknowledged)


async def test_a_request_in_full_carries_its_tenants_scope_and_the_engines_epoch(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        made = directive(admit(control))
        assert (made.mode, made.epoch, made.version) == (Mode.REUSE, engine.epoch, engine.version)
        assert made.namespace == scope_salt(SALT, "Private", "serving", UID, "acme").hex()
        assert made.scope == f"Private/{made.queue}"
        assert made.retention in engine.pushes[-1].retention


async def test_two_tenants_have_nothing_in_common(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        one, two = directive(admit(control, "acme")), directive(admit(control, "globex"))
        assert one.namespace != two.namespace
        assert one.scope != two.scope
        assert one.queue != two.queue
        assert one.retention != two.retention  # acme has an override


async def test_no_directive_names_a_tenant(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        assert b"acme" not in admit(control).directive
        assert b"acme" not in msgspec.json.encode(engine.pushes[-1])


async def test_a_cold_request_carries_no_salt_but_keeps_its_place_in_the_queue(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        control.policy.take_document(canonical(document(stage="Cold")))
        control.policy.take_resource(resource(stage="Full"))
        made = directive(admit(control))
        assert (made.mode, made.namespace, made.scope) == (Mode.COLD, "", "")
        assert made.queue
        assert made.retention


async def test_before_any_document_requests_are_cold_for_want_of_a_policy(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await until(control.engine_ready)
        ticket = admit(control)
        assert ticket.decision.reason.value == "PolicyUnavailable"
        assert directive(ticket).mode is Mode.COLD


async def test_after_a_restart_a_document_alone_permits_nothing(tmp_path: Path, engine: PolicyEngine) -> None:
    """The resource may say Engaged while the document, which the operator is too dead to write, says Full."""
    async with running_control(tmp_path, engine) as control:
        control.policy.take_document(canonical(document(stage="Full", protectedPercent=0)))
        await until(lambda: control.link.acknowledged)
        assert admit(control).decision.reason.value == "PolicyUnavailable"
        control.policy.take_resource(resource(stage="Full", killSwitch="Engaged"))
        assert admit(control, request="2" * 32).decision.reason.value == "KillSwitch"
        control.policy.take_resource(resource(stage="Full"))
        assert admit(control, request="3" * 32).decision.reason.value == "Reuse"


async def test_before_the_engine_was_heard_a_directive_has_no_epoch_that_could_match(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    engine.loading = True
    engine.epoch = 12
    async with running_control(tmp_path, engine) as control:
        control.policy.take_document(canonical(document(stage="Full", protectedPercent=0)))
        control.policy.take_resource(resource(stage="Full"))
        ticket = admit(control)
        assert (ticket.decision.reason.value, directive(ticket).epoch) == ("Reuse", 0)
        assert control.refusal() is not None
        engine.loading = False
        await until(lambda: control.link.acknowledged)
        assert control.permission.epoch == engine.epoch == 13
        assert control.refusal() is None


async def test_the_switch_is_in_force_in_the_very_call_that_brings_it_and_reaches_the_engine(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        before = admit(control)
        control.policy.take_resource(resource(stage="Full", killSwitch="Engaged"))
        after = admit(control)
        assert after.decision.reason.value == "KillSwitch"
        assert directive(after).mode is Mode.COLD
        began = asyncio.get_running_loop().time()
        await until(lambda: control.link.acknowledged)
        assert asyncio.get_running_loop().time() - began < 0.5
        assert engine.epoch == directive(before).epoch + 1


async def test_a_request_decided_before_a_loss_keeps_the_old_epoch(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        stale = control.permission
        control.policy.take_resource(resource(stage="Shadow"))
        decision = Decision(decide(Facts(stage=Stage.FULL)).reason, Mode.REUSE)
        ticket = control.admit("2" * 32, decision, Arrival(stale, control.grant("acme"), "other", 5))
        assert directive(ticket).epoch < control.permission.epoch


async def test_a_gain_does_not_raise_the_epoch(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        control.policy.take_document(canonical(document(stage="Shadow")))
        control.policy.take_resource(resource(stage="Full"))
        await until(lambda: control.link.acknowledged)
        epoch = control.permission.epoch
        control.policy.take_document(canonical(document(stage="Full")))
        await until(lambda: control.link.acknowledged)
        assert control.permission.stage is Stage.FULL
        assert control.permission.epoch == engine.epoch == epoch


async def test_a_revoked_key_raises_the_epoch(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        epoch = control.permission.epoch
        (tmp_path / "tenants" / "globex").unlink()
        control.refresh()
        assert control.permission.epoch == epoch + 1


async def test_new_salts_follow_a_new_policy(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        old = control.grant("acme")
        control.policy.take_document(canonical(document(uid="another", stage="Full")))
        assert control.grant("acme").namespace != old.namespace


async def test_requests_in_flight_are_counted_and_end_once(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        ticket = admit(control)
        assert control.in_flight == 1
        assert control.finish(ticket, outcome(ticket), 0.1, Ending.COMPLETED) == ticket.request
        assert control.in_flight == 0
        with pytest.raises(RuntimeError, match="twice"):
            control.finish(ticket, None, None, Ending.FAILED)
        assert control.in_flight == 0


async def test_what_happened_is_in_receipt_metrics_and_observation(tmp_path: Path, engine: PolicyEngine) -> None:
    lines: list[bytes] = []
    async with running_control(tmp_path, engine, lines) as control:
        await in_full(control)
        ticket = admit(control)
        control.finish(ticket, outcome(ticket, prompt_tokens=1024, reused_tokens=896), 0.1, Ending.COMPLETED)
        await until(lambda: lines)
        assert json.loads(lines[0])["reusedTokens"] == 896
        assert b'kvsteward_reused_tokens_total{generation="chat-1",scope_kind="Private"} 896.0' in control.metrics()
        observation = decode_observation(encode_observation(control.observation()))
        assert observation.counters["reusedTokens"] == 896
        assert observation.histograms["time_to_first_token/reuse"].count == 1
        assert observation.acknowledged_version == observation.policy_version == control.policy.version


async def test_a_request_whose_client_left_gets_its_receipt_from_the_engine(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        ticket = admit(control)
        engine.outcomes[ticket.request] = outcome(ticket, prompt_tokens=50, finish="cancelled")
        control.finish(ticket, None, None, Ending.CANCELLED)
        assert control.in_flight == 0
        await until(lambda: control.receipts.find(ticket.request))
        receipt = control.receipts.find(ticket.request)
        assert receipt is not None
        assert (receipt.prompt_tokens, receipt.finish, receipt.ending) == (50, "cancelled", "cancelled")


async def test_a_scope_violation_latches_the_pod_over_restarts_until_the_attempt_is_raised(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        epoch = control.permission.epoch
        ticket = admit(control)
        control.finish(ticket, outcome(ticket, scope_violation=True), 0.1, Ending.COMPLETED)
        assert control.permission.latch == "ScopeViolation"
        assert control.permission.epoch == epoch + 1
        assert b"kvsteward_scope_violations_total 1.0" in control.metrics()
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        assert admit(control).decision.reason.value == "KillSwitch"
        observation = control.observation()
        assert observation.latch is not None
        assert (observation.latch.reason, observation.cold_requested) == ("ScopeViolation", True)
        control.policy.take_document(canonical(document(stage="Full", protectedPercent=0, attempt=2)))
        assert admit(control).decision.reason.value == "Reuse"
        assert not (tmp_path / "latch.json").exists()


async def test_a_violation_whose_outcome_gets_lost_latches_the_pod_by_the_engines_own_word(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        engine.violations = 1
        await until(lambda: control.permission.latch == "ScopeViolation")
        await until(lambda: engine.answered == 1)
        assert not engine.state().latched


async def test_an_edit_that_raises_the_epoch_before_a_violation_is_heard_of_does_not_end_the_engines_latch(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        engine.violations = 1
        control.policy.take_document(canonical(document(stage="Full", protectedPercent=20)))
        await until(lambda: control.permission.latch == "ScopeViolation")
        assert next(push.violations for push in engine.pushes if push.version == control.permission.version) == 0


async def test_an_engine_that_latched_while_no_sidecar_lived_to_hear_of_it_latches_the_pod(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    engine.epoch, engine.violations = 7, 1
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        assert (control.permission.latch, engine.epoch) == ("ScopeViolation", 8)
        assert admit(control).decision.reason.value == "KillSwitch"
        control.policy.take_document(canonical(document(stage="Full", protectedPercent=0, attempt=2)))
        assert admit(control, request="2" * 32).decision.reason.value == "Reuse"


async def test_violations_of_long_ago_do_not_latch_a_sidecar_that_restarts(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    engine.violations = engine.answered = 1
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        assert admit(control).decision.reason.value == "Reuse"


async def test_a_latch_of_before_any_policy_is_not_released_by_the_first_one(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        control.hold_cold()
        await in_full(control)
        assert control.permission.stopped
        control.release()
        assert not control.permission.stopped


async def test_the_switch_is_confirmed_only_by_the_engine(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        engine.confirm_after = asyncio.Event()
        control.policy.take_resource(resource(stage="Full", killSwitch="Engaged"))
        await until(lambda: engine.pushes[-1].epoch == control.permission.epoch)
        observation = control.observation()
        assert (observation.cold_requested, observation.cold_confirmed) == (True, False)
        engine.confirm_after.set()
        await until(lambda: control.observation().cold_confirmed)


async def test_the_observation_names_the_generation_whose_switch_is_in_force(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    def of_generation(number: int, **rollout: Any) -> dict[str, Any]:
        made = resource(stage="Full", **rollout)
        made["metadata"]["generation"] = number
        return made

    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        control.policy.take_resource(of_generation(3))
        epoch = control.permission.epoch
        assert control.observation().resource_generation == 3
        control.policy.take_resource(of_generation(4, killSwitch="Engaged"))
        assert (control.observation().resource_generation, control.observation().cold_requested) == (4, True)
        control.policy.take_resource(of_generation(5, killSwitch="Neither"))
        assert (control.observation().resource_generation, control.observation().cold_requested) == (4, True)
        assert control.permission.epoch == epoch + 1


async def test_a_sidecar_that_restarts_goes_past_the_engines_epoch(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        before = engine.epoch
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        assert engine.epoch == before + 1


async def test_an_engine_found_ahead_is_passed(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        engine.epoch = 50
        control.policy.take_resource(resource(stage="Shadow"))
        await until(lambda: control.link.acknowledged)
        assert engine.epoch == 51


async def test_problems_name_a_reason_and_are_in_the_observation(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        assert control.observation().problems == ()
        for name in ("acme", "globex"):
            (tmp_path / "tenants" / name).write_text("the same key under two tenants, long enough".replace(" ", "-"))
        control.refresh()
        problems = control.observation().problems
        assert [problem.partition(":")[0] for problem in problems] == ["IdentityUnavailable"]


async def test_a_latch_that_cannot_be_written_holds_all_the_same_and_is_said(
    tmp_path: Path, engine: PolicyEngine
) -> None:
    async with running_control(tmp_path, engine) as control:
        await in_full(control)
        (tmp_path / "latch.new").mkdir()
        control.hold_cold()
        assert control.permission.stopped
        assert control.observation().problems[0].startswith("LatchUnwritable")


async def test_cohort_and_tenant_digests_depend_on_the_salt_alone(tmp_path: Path, engine: PolicyEngine) -> None:
    async with running_control(tmp_path, engine) as control:
        assert control.bucket("session") == control.bucket("session")
        assert len({control.bucket(f"session {number}") for number in range(100)}) > 90
        await in_full(control)
        old = control.grant("acme").digest
        control.permission = replace(control.permission, version="sha256:other")
        control._grants = {}
        assert control.grant("acme").digest == old
