"""Documents and resources, from the API server or a file: the last good one stays through everything."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
import yaml
from kvsteward_contract.document import canonical, version_of
from kvsteward_contract.policy import KillSwitch, Stage
from kvsteward_sidecar.kube import ApiServer
from kvsteward_sidecar.policy_source import FileSource, KubernetesSource, PolicyState
from support.control_plane import UID, ApiFake, config_map, document, resource, until

MAPS = "/api/v1/namespaces/serving/configmaps"
POLICIES = "/apis/kvsteward.dev/v1alpha1/namespaces/serving/kvcachepolicies"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Changes:
    def __init__(self) -> None:
        self.count = 0
        self.clock = Clock()
        self.state = PolicyState(self.note, self.clock)

    def note(self) -> None:
        self.count += 1


@pytest.fixture
def changes() -> Changes:
    return Changes()


def test_a_document_is_taken_with_the_version_of_its_bytes(changes: Changes) -> None:
    data = canonical(document(stage="Full"))
    changes.state.take_document(data)
    assert changes.state.version == version_of(data)
    assert changes.state.document is not None
    assert changes.state.document.rollout.stage is Stage.FULL
    assert changes.count == 1


def test_the_same_document_again_changes_nothing(changes: Changes) -> None:
    for _ in range(2):
        changes.state.take_document(canonical(document()))
    assert changes.count == 1


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data.replace(b"document.v1", b"document.v2"), id="unknown-version"),
        pytest.param(lambda data: data.replace(b'"generation"', b'"novelty":1,"generation"'), id="unknown-field"),
        pytest.param(lambda data: data[:-1], id="cut-short"),
        pytest.param(lambda data: b"", id="empty"),
    ],
)
def test_a_document_that_cannot_be_read_leaves_the_last_good_one_and_is_said(
    changes: Changes, spoil: Callable[[bytes], bytes]
) -> None:
    changes.state.take_document(canonical(document(stage="Full")))
    before = changes.state.document, changes.state.version
    changes.state.take_document(spoil(canonical(document(stage="Canary"))))
    assert (changes.state.document, changes.state.version) == before
    assert [problem.partition(":")[0] for problem in changes.state.problems] == ["PolicyUnreadable"]
    changes.state.take_document(canonical(document(stage="Full")))
    assert changes.state.problems == ()


def test_a_resource_before_its_document_counts_once_the_document_is_there(changes: Changes) -> None:
    changes.state.take_resource(resource(stage="Shadow", killSwitch="Engaged"))
    changes.state.take_document(canonical(document(stage="Full")))
    assert changes.state.resource is not None
    assert changes.state.resource.kill_switch is KillSwitch.ENGAGED


def test_a_new_resource_of_the_same_name_is_not_followed(changes: Changes) -> None:
    changes.state.take_document(canonical(document()))
    changes.state.take_resource(resource(stage="Full"))
    changes.state.take_resource(resource(uid="another", stage="Cold", killSwitch="Engaged"))
    assert changes.state.resource is not None
    assert changes.state.resource.stage is Stage.FULL
    assert changes.state.problems[0].startswith("ResourceReplaced")


def test_an_unreadable_switch_leaves_the_last_reading_and_is_said(changes: Changes) -> None:
    changes.state.take_document(canonical(document()))
    changes.state.take_resource(resource(stage="Full", killSwitch="Engaged"))
    changes.state.take_resource(resource(stage="Full", killSwitch="Off"))
    assert changes.state.resource is not None
    assert changes.state.resource.kill_switch is KillSwitch.ENGAGED
    assert "killSwitch is 'Off'" in changes.state.problems[0]


def test_a_document_of_another_policy_drops_the_reading_of_the_old_ones_resource(changes: Changes) -> None:
    changes.state.take_document(canonical(document()))
    changes.state.take_resource(resource(killSwitch="Engaged"))
    changes.state.take_document(canonical(document(uid="another")))
    assert changes.state.resource is None


class Cluster:
    """An API server, and a source that follows it."""

    def __init__(self, changes: Changes) -> None:
        self.api, self.changes, self.state = ApiFake(), changes, changes.state

    async def __aenter__(self) -> Self:
        await self.api.start()
        self._session = aiohttp.ClientSession()
        source = KubernetesSource(
            self.state,
            self._session,
            ApiServer(self.api.url, None, False),
            namespace="serving",
            policy="chat",
            config_map="chat-1",
        )
        self._task = asyncio.create_task(source.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._session.close()
        await self.api.stop()


@pytest.fixture
async def cluster(changes: Changes) -> AsyncIterator[Cluster]:
    async with Cluster(changes) as made:
        yield made


async def test_both_objects_are_followed(cluster: Cluster) -> None:
    cluster.api.put(MAPS, "chat-1", config_map(document(stage="Full")))
    cluster.api.put(POLICIES, "chat", resource(stage="Full"))
    await until(lambda: cluster.state.document and cluster.state.resource and cluster.api.watching == 2)
    cluster.api.put(POLICIES, "chat", resource(stage="Full", killSwitch="Engaged"))
    await until(lambda: cluster.state.resource.kill_switch is KillSwitch.ENGAGED)
    cluster.api.put(MAPS, "chat-1", config_map(document(stage="Canary")))
    await until(lambda: cluster.state.document.rollout.stage is Stage.CANARY)


async def test_deleted_objects_leave_what_was_last_read(cluster: Cluster) -> None:
    cluster.api.put(MAPS, "chat-1", config_map(document(stage="Full")))
    cluster.api.put(POLICIES, "chat", resource(stage="Canary"))
    await until(lambda: cluster.state.document and cluster.state.resource and cluster.api.watching == 2)
    cluster.api.delete(MAPS, "chat-1")
    cluster.api.delete(POLICIES, "chat")
    await until(lambda: len(cluster.state.problems) == 2)
    assert cluster.state.document.rollout.stage is Stage.FULL
    assert cluster.state.resource.stage is Stage.CANARY
    assert {problem.partition(":")[0] for problem in cluster.state.problems} == {"PolicyAbsent"}


async def test_the_policy_ages_while_either_watch_is_silent_and_a_word_from_both_renews_it(
    cluster: Cluster, changes: Changes
) -> None:
    cluster.api.put(MAPS, "chat-1", config_map(document()))
    cluster.api.put(POLICIES, "chat", resource())
    await until(lambda: cluster.state.resource and cluster.state.document and cluster.api.watching == 2)
    changes.clock.now += 100
    assert cluster.state.age() == 100
    cluster.api.put(POLICIES, "chat", resource(stage="Full"))
    await until(lambda: cluster.state.resource.stage is Stage.FULL)
    assert cluster.state.age() == 100
    cluster.api.bookmark()
    await until(lambda: cluster.state.age() == 0)


async def test_an_api_server_that_refuses_is_said_and_never_cold(cluster: Cluster) -> None:
    cluster.api.put(MAPS, "chat-1", config_map(document(stage="Full")))
    await until(lambda: cluster.state.document and cluster.api.watching == 2)
    cluster.api.status = 403
    cluster.api.end_watches()
    await until(lambda: any("PolicyUnconfirmed" in problem for problem in cluster.state.problems))
    assert cluster.state.document.rollout.stage is Stage.FULL
    cluster.api.status = 0
    await until(lambda: not any("PolicyUnconfirmed" in problem for problem in cluster.state.problems))


class Edited:
    """A policy file and the source that follows it; every write gets an mtime of its own."""

    def __init__(self, path: Path, changes: Changes) -> None:
        self.path, self.state = path, changes.state
        self.source = FileSource(self.state, path)
        self.resource: dict[str, Any] = copy.deepcopy(resource(stage="Full"))
        del self.resource["metadata"]["uid"]
        self.write()

    def write(self, text: str | None = None) -> None:
        self.path.write_text(yaml.safe_dump(self.resource) if text is None else text)
        self.source._stamp = None
        self.source.look()


@pytest.fixture
def edited(tmp_path: Path, changes: Changes) -> Edited:
    return Edited(tmp_path / "policy.yaml", changes)


def test_a_file_gives_the_same_document_as_the_operator_would(edited: Edited) -> None:
    assert edited.state.document == document(uid="local-chat", generation="local", stage="Full")
    assert edited.state.resource is not None


def test_an_edit_of_stage_switch_and_quota_is_followed(edited: Edited) -> None:
    edited.resource["spec"]["rollout"] = {"stage": "Canary", "killSwitch": "Engaged"}
    edited.resource["spec"]["scopes"]["private"] = {"quotaPercent": 20}
    edited.write()
    assert edited.state.document.rollout.stage is Stage.CANARY
    assert edited.state.resource.kill_switch is KillSwitch.ENGAGED
    assert edited.state.document.private.quota_percent == 20


def test_the_switch_and_a_lower_stage_act_even_from_a_file_that_is_rejected(edited: Edited) -> None:
    edited.resource["spec"]["rollout"] = {"stage": "Cold", "killSwitch": "Engaged", "novelty": True}
    edited.write()
    assert edited.state.problems[0].startswith("PolicyRejected")
    assert "novelty" in edited.state.problems[0]
    assert edited.state.document.rollout.stage is Stage.FULL
    assert (edited.state.resource.stage, edited.state.resource.kill_switch) == (Stage.COLD, KillSwitch.ENGAGED)


@pytest.mark.parametrize(
    "text",
    [
        *["", "spec: [", "- a list", "just words", "spec: {}", "kind: Pod\nmetadata: {name: chat}", "\t"],
        *["a: 1\na: 2", "a: 2025-13-47", "a: " + "9" * 5_000, "[" * 3_000, 'metadata: {name: "\\uD800"}'],
    ],
)
def test_a_file_that_is_no_policy_leaves_the_last_good_one(edited: Edited, text: str) -> None:
    before = edited.state.document
    edited.write(text)
    assert edited.state.document is before
    assert edited.state.problems[0].startswith("PolicyRejected")
    edited.write()
    assert edited.state.problems == ()


def test_a_file_that_vanished_leaves_the_last_good_policy(edited: Edited) -> None:
    edited.path.unlink()
    edited.source.look()
    assert edited.state.document is not None
    assert "No such file" in edited.state.problems[0]


def test_a_switch_that_is_written_twice_is_refused_and_not_the_last_one_taken(edited: Edited) -> None:
    """As an editor leaves it: an Engaged above an older Released."""
    text, stage = yaml.safe_dump(edited.resource), "    stage: Full\n"
    assert stage in text
    edited.write(text.replace(stage, f"    killSwitch: Engaged\n{stage}    killSwitch: Released\n"))
    assert "'killSwitch' occurs twice" in edited.state.problems[0]


@pytest.mark.parametrize(
    ("part", "field", "value", "named"),
    [
        pytest.param("engine", "maxConcurrent", 3, "spec.engine", id="engine"),
        pytest.param("cache", "blockTokens", 32, "spec.cache.blockTokens", id="block-size"),
        pytest.param("cache", "capacity", "128Mi", "spec.cache.capacity", id="capacity"),
    ],
)
def test_what_needs_a_new_engine_is_refused_by_name_and_not_silently_ignored(
    edited: Edited, part: str, field: str, value: object, named: str
) -> None:
    edited.resource["spec"][part][field] = value
    edited.write()
    assert f"{named} takes effect only at a start" in edited.state.problems[0]


def test_while_paused_a_raise_waits_and_a_lowering_acts(edited: Edited) -> None:
    edited.resource["spec"]["rollout"] = {"stage": "Shadow", "progress": "Paused"}
    edited.write()
    assert edited.state.document.rollout.stage is Stage.SHADOW
    edited.resource["spec"]["rollout"] = {"stage": "Full", "progress": "Paused"}
    edited.write()
    assert edited.state.document.rollout.stage is Stage.SHADOW
    edited.resource["spec"]["rollout"] = {"stage": "Full", "progress": "Running"}
    edited.write()
    assert edited.state.document.rollout.stage is Stage.FULL


async def test_an_edit_is_noticed_within_a_second(tmp_path: Path, changes: Changes) -> None:
    edited = Edited(tmp_path / "policy.yaml", changes)
    task = asyncio.create_task(edited.source.run())
    edited.resource["spec"]["rollout"] = {"stage": "Cold"}
    edited.path.write_text(yaml.safe_dump(edited.resource))
    await until(lambda: edited.state.document.rollout.stage is Stage.COLD, 1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_uid_of_a_file_is_its_policys_name_whatever_the_file_claims(tmp_path: Path, changes: Changes) -> None:
    edited = Edited(tmp_path / "policy.yaml", changes)
    edited.resource["metadata"]["uid"] = UID
    edited.write()
    assert edited.state.document.policy.uid == "local-chat"
