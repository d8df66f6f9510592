"""Generations: one identity replaces another, template changes stay within one, an operator's upgrade is neither."""

from dataclasses import replace

import pytest
from kvsteward_contract.status import GenerationStatus
from kvsteward_operator.generations import State, generations, serving
from kvsteward_operator.world import Pod
from support.operating import SETTINGS, Operating


def pod(generation: str, *, ready: bool = True, terminating: bool = False) -> Pod:
    return Pod(f"{generation}-pod", "uid", "10.0.0.1", generation, ready, terminating, True, "")


@pytest.mark.parametrize(
    ("prior", "pods", "wanted", "expected"),
    [
        pytest.param({}, [], 1, {"new": "Starting"}, id="a first one starts"),
        pytest.param({"new": "Starting"}, ["new"], 1, {"new": "Serving"}, id="complete, it serves"),
        pytest.param({"new": "Starting"}, ["new"], 2, {"new": "Starting"}, id="one of two is not complete"),
        pytest.param({"new": "Serving"}, [], 2, {"new": "Serving"}, id="once it served it serves"),
        pytest.param({}, [], 0, {"new": "Serving"}, id="no replicas are complete"),
        pytest.param(
            {"old": "Serving"}, ["old"], 1, {"old": "Serving", "new": "Starting"}, id="the old one serves meanwhile"
        ),
        pytest.param(
            {"old": "Serving"}, [], 1, {"old": "Serving", "new": "Starting"}, id="without pods too: nothing took over"
        ),
        pytest.param(
            {"old": "Serving", "new": "Starting"}, ["old", "new"], 1, {"old": "Draining", "new": "Serving"},
            id="the new one takes over",
        ),
        pytest.param({"old": "Draining", "new": "Serving"}, ["new"], 1, {"new": "Serving"}, id="the old one has gone"),
        pytest.param(
            {"new": "Serving", "other": "Starting"}, ["new", "other"], 1, {"other": "Draining", "new": "Serving"},
            id="an edit reverted midway keeps what served",
        ),
        pytest.param({}, ["old"], 1, {"old": "Draining", "new": "Starting"}, id="a status that was lost"),
    ],
)  # fmt: skip
def test_the_newest_that_once_was_complete_serves(
    prior: dict[str, str], pods: list[str], wanted: int, expected: dict[str, str]
) -> None:
    stored = [GenerationStatus(name=name, state=state) for name, state in prior.items()]
    found = generations(stored, "new", [pod(name) for name in pods], [], wanted)
    assert {one.name: one.state.value for one in found} == expected
    assert [one.state for one in found].count(State.SERVING) <= 1
    assert found[-1].name == "new"


def test_pods_that_are_going_do_not_make_a_generation_complete() -> None:
    found = generations([], "new", [pod("new", terminating=True)], [], 1)
    assert serving(found) is None


async def rolling() -> tuple[Operating, str]:
    """A policy that serves at Full, and the name of its generation."""
    operating = Operating()
    operating.create(rollout={"stage": "Full"})
    await operating.run()
    return operating, operating.status.generations[0].name


def config_maps(operating: Operating) -> set[str]:
    return {body["metadata"]["name"] for body in operating.api.of_kind("ConfigMap")}


def readable(operating: Operating) -> set[str]:
    return set(operating.api.of_kind("Role")[0]["rules"][0]["resourceNames"])


async def test_another_model_revision_is_a_generation_of_its_own_and_the_old_one_drains() -> None:
    operating, old = await rolling()
    leaving = True
    operating.workloads.drained = lambda pod: not leaving
    operating.edit(engine={"model": {"revision": "2"}})
    await operating.turn()
    new = operating.status.generations[-1].name
    assert new != old
    assert config_maps(operating) == readable(operating) == {old, new}
    assert [(one.name, one.state) for one in operating.status.generations] == [(old, "Serving"), (new, "Starting")]
    await operating.run()
    # Both old pods are still draining: their document and the right to read it stay.
    assert [(one.name, one.state) for one in operating.status.generations] == [(old, "Draining"), (new, "Serving")]
    assert config_maps(operating) == readable(operating) == {old, new}
    assert operating.condition("Ready") == ("True", "Ready")
    leaving = False
    await operating.run()
    assert config_maps(operating) == readable(operating) == {new}
    assert [one.name for one in operating.status.generations] == [new]
    assert operating.status.stage == "Full"
    assert operating.events[-2:] == ["RolloverStarted", "RolloverDrained"]


async def test_a_draining_generation_follows_the_stage_too() -> None:
    operating, old = await rolling()
    operating.workloads.drained = lambda pod: False
    operating.edit(engine={"model": {"revision": "2"}})
    await operating.run()
    operating.edit(rollout={"stage": "Cold"})
    await operating.run()
    assert {one.name: one.stage for one in operating.status.generations}[old] == "Cold"
    assert {one.name: one.model_revision for one in operating.status.generations}[old] == "1"


async def test_an_edit_that_is_reverted_midway_keeps_the_generation_that_serves_and_its_stage() -> None:
    operating, old = await rolling()
    operating.workloads.ready = lambda pod: pod["metadata"]["labels"]["kvsteward.dev/generation"] == old
    operating.edit(engine={"model": {"revision": "2"}})
    await operating.run()
    assert operating.status.stage == "Full"
    operating.edit(engine={"model": {"revision": "1"}})
    await operating.run()
    assert [(one.name, one.state) for one in operating.status.generations] == [(old, "Serving")]
    assert operating.status.stage == "Full"
    assert [entry.reason for entry in operating.status.history] == [
        "StageRaised", "RolloverStarted", "RolloverDrained",
    ]  # fmt: skip


async def test_a_template_change_stays_within_the_generation() -> None:
    operating, old = await rolling()
    before = operating.deployment["spec"]["template"]
    operating.edit(engine={"maxConcurrent": 8, "template": {"nodeSelector": {"pool": "gpu"}}})
    await operating.run()
    assert [one.name for one in operating.status.generations] == [old]
    assert operating.deployment["spec"]["template"] != before
    assert "RolloverStarted" not in operating.events
    operating.edit(engine={"maxConcurrent": 64, "template": None})
    await operating.run()
    assert operating.deployment["spec"]["template"] == before


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"rollout": {"stage": "Canary", "canary": {"percent": 9}}}, id="rollout"),
        pytest.param({"scopes": {"private": {"quotaPercent": 7}}}, id="quota"),
        pytest.param({"scopes": {"overrides": [{"tenant": "acme", "quotaPercent": 9}]}}, id="override"),
        pytest.param({"workloads": [{"name": "summaries"}]}, id="workloads"),
        pytest.param({"rollover": {"strategy": "DrainFirst"}}, id="strategy"),
        pytest.param({"engine": {"replicas": 5}}, id="replicas"),
        pytest.param({"cache": {"blockTokens": 16, "dtype": "Auto"}, "rollover": {"drainSeconds": 120}}, id="defaults"),
    ],
)
async def test_what_is_no_part_of_the_pods_restarts_none(edit: dict[str, object]) -> None:
    operating, old = await rolling()
    before = operating.deployment["spec"]["template"]
    operating.edit(**edit)
    await operating.run()
    assert operating.deployment["spec"]["template"] == before
    assert [one.name for one in operating.status.generations] == [old]


async def test_another_operator_with_other_images_restarts_nothing_until_the_identity_changes() -> None:
    operating, old = await rolling()
    before = operating.deployment["spec"]["template"]
    operating.restart(replace(SETTINGS, engine_image="kvsteward/engine:2", sidecar_image="kvsteward/sidecar:2"))
    await operating.run()
    operating.edit(rollout={"stage": "Shadow"})
    await operating.run()
    assert operating.deployment["spec"]["template"] == before
    assert operating.status.image == "kvsteward/engine:1"
    # A change of the pods within the generation keeps the engine, which pages depend on, and renews the sidecar.
    operating.edit(engine={"maxConcurrent": 8})
    await operating.run()
    assert images(operating) == {"engine": "kvsteward/engine:1", "sidecar": "kvsteward/sidecar:2"}
    assert [one.name for one in operating.status.generations] == [old]
    operating.edit(engine={"model": {"revision": "2"}})
    await operating.run()
    assert images(operating) == {"engine": "kvsteward/engine:2", "sidecar": "kvsteward/sidecar:2"}
    operating.edit(engine={"model": {"revision": "1"}})
    await operating.run()
    assert images(operating)["engine"] == "kvsteward/engine:1"
    assert [one.name for one in operating.status.generations] == [old]


async def test_an_image_that_is_named_is_an_identity_of_its_own() -> None:
    operating, old = await rolling()
    operating.edit(engine={"image": "registry/engine:x"})
    await operating.run()
    assert images(operating)["engine"] == operating.status.image == "registry/engine:x"
    assert operating.status.generations[0].name != old
    operating.edit(engine={"image": ""})
    await operating.run()
    assert operating.status.generations[0].name == old


def images(operating: Operating) -> dict[str, str]:
    pod = operating.deployment["spec"]["template"]["spec"]
    return {container["name"]: container["image"] for container in [*pod["containers"], *pod["initContainers"]]}


async def test_old_revisions_go_and_the_ones_that_generations_stand_on_stay() -> None:
    operating, old = await rolling()
    first = operating.api.of_kind("ControllerRevision")[0]["metadata"]["name"]
    operating.workloads.drained = lambda pod: False
    operating.edit(engine={"model": {"revision": "2"}})
    await operating.run()
    for percent in range(1, 15):
        operating.edit(rollout={"stage": "Canary", "canary": {"percent": percent}})
        await operating.run()
    names = [body["metadata"]["name"] for body in operating.api.of_kind("ControllerRevision")]
    assert first in names
    assert len(names) <= 12
    operating.workloads.drained = lambda pod: True
    await operating.run()
    assert first not in [body["metadata"]["name"] for body in operating.api.of_kind("ControllerRevision")]
    assert old not in config_maps(operating)
