"""Each message's golden example reads and writes back unchanged; its other end's tests read the same files."""

import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsteward_contract import directive
from kvsteward_contract.directive import Directive, EnginePolicy, EngineState, Outcome
from kvsteward_contract.document import (
    DocumentRollout,
    PolicyDocument,
    UnknownDocument,
    canonical,
    decode_document,
    rollout_in_force,
    version_of,
)
from kvsteward_contract.metrics import METRICS, OBSERVED_COUNTERS, band
from kvsteward_contract.observation import Histogram, Observation, Recorder
from kvsteward_contract.policy import Canary, KillSwitch, Progress, Rollout, Stage

GOLDEN = Path(__file__).parents[2] / "contract/golden"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("directive", Directive, id="directive"),
        pytest.param("engine-policy", EnginePolicy, id="engine-policy"),
        pytest.param("engine-state", EngineState, id="engine-state"),
        pytest.param("outcome", Outcome, id="outcome"),
        pytest.param("document", PolicyDocument, id="document"),
        pytest.param("observation", Observation, id="observation"),
    ],
)
def test_golden_examples_read_and_write_back_unchanged(name, kind):
    data = (GOLDEN / f"{name}.json").read_bytes()
    message = msgspec.json.decode(data, type=kind)
    assert json.loads(msgspec.json.encode(message)) == json.loads(data)
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.json.decode(json.dumps(json.loads(data) | {"surprise": 1}), type=kind)


def test_directives_are_ascii_so_that_a_header_can_carry_them():
    message = msgspec.json.decode((GOLDEN / "directive.json").read_bytes(), type=Directive)
    assert directive.encode(message).isascii()
    assert directive.decode_directive(directive.encode(message)) == message


def test_a_document_has_one_spelling_and_its_version_is_that_spellings_digest():
    document = decode_document((GOLDEN / "document.json").read_bytes())
    data = canonical(document)
    assert canonical(decode_document(data)) == data
    assert b" " not in data and data.index(b'"apiVersion"') < data.index(b'"generation"') < data.index(b'"workloads"')
    assert version_of(data).startswith("sha256:") and version_of(data) != version_of(data + b" ")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"apiVersion": "kvsteward.dev/document.v2"}, id="another-version"),
        pytest.param({"scopesV2": []}, id="an-unknown-field"),
        pytest.param({"rollout": {}}, id="a-missing-field"),
    ],
)
def test_a_document_that_is_not_wholly_understood_is_refused(change):
    with pytest.raises(UnknownDocument, match="cannot be read"):
        decode_document(json.dumps(json.loads((GOLDEN / "document.json").read_text()) | change))


CURRENT = DocumentRollout(Stage.CANARY, Canary(25, ("summaries",)), 5, KillSwitch.RELEASED, 1)


@pytest.mark.parametrize(
    ("wanted", "stage", "canary", "protected"),
    [
        pytest.param(Rollout(stage=Stage.FULL), Stage.CANARY, Canary(0, ("summaries",)), 5, id="a-raise-waits"),
        pytest.param(
            Rollout(stage=Stage.SHADOW, canary=CURRENT.canary), Stage.SHADOW, CURRENT.canary, 5, id="a-lowering-acts"
        ),
        pytest.param(
            Rollout(stage=Stage.CANARY, canary=Canary(50, ("summaries",))),
            Stage.CANARY, CURRENT.canary, 5, id="a-wider-canary-waits",
        ),
        pytest.param(
            Rollout(stage=Stage.CANARY, canary=Canary(5, ("summaries",))),
            Stage.CANARY, Canary(5, ("summaries",)), 5, id="a-narrower-canary-acts",
        ),
        pytest.param(
            Rollout(stage=Stage.CANARY, canary=Canary(25, ("checkout",))),
            Stage.CANARY, Canary(0, ("checkout",)), 5, id="another-workload-leaves-nobody",
        ),
        pytest.param(
            Rollout(stage=Stage.CANARY, canary=CURRENT.canary, protected_percent=1),
            Stage.CANARY, CURRENT.canary, 5, id="a-smaller-control-waits",
        ),
        pytest.param(
            Rollout(stage=Stage.CANARY, canary=CURRENT.canary, protected_percent=20),
            Stage.CANARY, CURRENT.canary, 20, id="a-larger-control-acts",
        ),
    ],
)  # fmt: skip
def test_a_paused_rollout_only_loses_permission(wanted, stage, canary, protected):
    paused = msgspec.structs.replace(wanted, progress=Progress.PAUSED)
    held = rollout_in_force(paused, CURRENT)
    assert (held.stage, held.canary, held.protected_percent) == (stage, canary, protected)
    running = rollout_in_force(wanted, CURRENT)
    assert (running.stage, running.canary) == (wanted.stage, wanted.canary)


def test_a_policy_that_begins_paused_begins_in_shadow_at_most():
    paused = Rollout(stage=Stage.FULL, progress=Progress.PAUSED)
    assert rollout_in_force(paused, None).stage is Stage.SHADOW


def test_the_switch_acts_while_paused():
    paused = Rollout(stage=Stage.CANARY, progress=Progress.PAUSED, kill_switch=KillSwitch.ENGAGED)
    assert rollout_in_force(paused, CURRENT).kill_switch is KillSwitch.ENGAGED


values = st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=60)


def recorded(numbers):
    recorder = Recorder()
    for number in numbers:
        recorder.add(number)
    return recorder.snapshot()


@given(values, st.floats(0, 1))
def test_quantiles_are_within_one_percent(numbers, share):
    exact = sorted(numbers)[math.floor(share * (len(numbers) - 1))]
    assert recorded(numbers).quantile(share) == pytest.approx(exact, rel=0.0101)


@given(values, values)
def test_merged_histograms_are_the_histogram_of_all_and_difference_takes_it_back(one, other):
    merged = recorded(one).merge(recorded(other))
    assert merged.buckets == recorded(one + other).buckets
    assert merged.difference(recorded(one)).buckets == recorded(other).buckets


def test_a_histogram_whose_counts_fell_is_of_another_start():
    with pytest.raises(ValueError, match="another start"):
        Histogram({1: 1}).difference(Histogram({1: 2}))
    assert Histogram().quantile(0.5) is None


def test_observed_counters_are_sums_of_metrics_that_exist():
    assert set(OBSERVED_COUNTERS.values()) <= {metric.name for metric in METRICS if metric.kind == "counter"}


@pytest.mark.parametrize(("tokens", "name"), [(0, "0-255"), (255, "0-255"), (256, "256-1023"), (99_999, "16384+")])
def test_prompt_lengths_fall_into_bands(tokens, name):
    assert band(tokens) == name
