"""The operator's turns against a fake API server: what is made, what is put back, what is told."""

import msgspec
import pytest
from kvsteward_operator import errors
from kvsteward_operator.index import Place
from kvsteward_operator.objects.documents import read_config_map
from support.operating import KEY, Operating

OWN_KINDS = [
    "ConfigMap", "ControllerRevision", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding",
    "Secret", "Service", "ServiceAccount",
]  # fmt: skip


async def started(**spec: object) -> Operating:
    operating = Operating()
    operating.create(**spec)
    await operating.run()
    return operating


async def test_a_policy_becomes_pods_that_serve_and_are_ready() -> None:
    operating = await started()
    kinds = {place.kind for place in operating.api.objects}
    assert set(OWN_KINDS) <= kinds
    assert len(operating.api.of_kind("Pod")) == 2
    status = operating.status
    assert status.stage == "Shadow"
    assert status.endpoint == "http://chat.serving.svc:8080"
    assert status.selector == "kvsteward.dev/policy=chat"
    assert status.image == "kvsteward/engine:1"
    assert status.observed_generation == 1
    assert status.replicas == 2
    assert status.capacity.pool_tokens == 65536
    assert [(one.state, one.acknowledged_replicas, one.replicas) for one in status.generations] == [("Serving", 2, 2)]
    assert {one.type: one.status for one in status.conditions} == {
        "Accepted": "True",
        "Available": "True",
        "Progressing": "False",
        "Promoted": "False",
        "ColdPath": "False",
        "Degraded": "False",
        "Ready": "True",
    }
    assert operating.events == ["PolicyAccepted", "PodsCreated", "ShadowStarted"]


async def test_every_condition_is_there_from_the_first_visit_on() -> None:
    operating = Operating()
    operating.create()
    await operating.turn()
    assert [one.type for one in operating.status.conditions] == [
        "Accepted", "Available", "Progressing", "Promoted", "ColdPath", "Degraded", "Ready",
    ]  # fmt: skip
    assert operating.condition("Ready") == ("False", "PodsStarting")


async def test_what_pods_need_exists_before_the_deployment_and_the_revision_before_all() -> None:
    operating = Operating()
    operating.create()
    await operating.turn()
    order = [kind for verb, kind, _ in operating.api.writes if verb in ("apply", "create") and kind != "Event"]
    assert order[0] == "Secret"
    assert order[1] == "ControllerRevision"
    assert order[-1] == "Deployment"
    assert order.index("ConfigMap") < order.index("Role") < order.index("Deployment")


async def test_nothing_is_written_when_nothing_changes() -> None:
    operating = await started()
    operating.api.calls.clear()
    for _ in range(20):
        operating.now += 10
        operating.sidecars.scrape()
        await operating.turn()
    assert {call for call in operating.api.writes if call[:2] != ("create", "Secret")} == set()
    # The Secret can't be read, only created: that it is there shows by the refusal.
    assert operating.api.writes.count(("create", "Secret", "chat-kvsteward")) >= 3


@pytest.mark.parametrize("kind", [kind for kind in OWN_KINDS if kind != "ControllerRevision"])
async def test_a_deleted_object_is_put_back(kind: str) -> None:
    operating = await started()
    body = operating.api.of_kind(kind)[0]
    operating.api.remove(body)
    operating.now += 60
    await operating.turn()
    assert operating.api.find(kind, body["metadata"]["name"]) is not None


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        pytest.param("Deployment", {"spec": {"replicas": 7}}, id="replicas"),
        pytest.param("Service", {"spec": {"ports": [{"name": "http", "port": 1, "targetPort": 1}]}}, id="port"),
        pytest.param("Role", {"rules": []}, id="rules"),
        pytest.param("ConfigMap", {"data": {"document": "{}", "version": "x"}}, id="document"),
        pytest.param("NetworkPolicy", {"spec": {"ingress": [{}]}}, id="ingress"),
        pytest.param("PodDisruptionBudget", {"spec": {"maxUnavailable": 2}}, id="budget"),
    ],
)
async def test_a_changed_object_is_put_back_and_only_that_one(kind: str, spoil: dict[str, object]) -> None:
    operating = await started()
    good = operating.api.of_kind(kind)[0]
    operating.api.put({**good, **{name: {**good[name], **value} if isinstance(value, dict) else value
                                  for name, value in spoil.items()}})  # fmt: skip
    operating.api.calls.clear()
    await operating.turn()
    assert [call[1] for call in operating.api.writes if call[0] == "apply"] == [kind]
    back = operating.api.find(kind, good["metadata"]["name"])
    assert back is not None
    assert all(back[name] == good[name] for name in spoil)


async def test_the_secret_is_never_read_and_never_changed() -> None:
    operating = await started()
    before = operating.api.find("Secret", "chat-kvsteward")
    operating.now += 3600
    await operating.turn()
    assert operating.api.find("Secret", "chat-kvsteward") == before
    assert {verb for verb, kind, _ in operating.api.calls if kind == "Secret"} == {"create"}


async def test_a_stage_edit_changes_the_document_and_no_pod() -> None:
    operating = await started()
    template = operating.deployment["spec"]["template"]
    pods = [pod["metadata"]["uid"] for pod in operating.api.of_kind("Pod")]
    for stage, told in (("Canary", "CanaryStarted"), ("Full", "Promoted"), ("Cold", "RolledBack")):
        operating.edit(rollout={"stage": stage, "canary": {"percent": 5}})
        await operating.run()
        assert operating.status.stage == stage
        assert operating.events[-1] == told
        document, _ = read_config_map(operating.api.of_kind("ConfigMap")[0])
        assert document is not None
        assert document.rollout.stage == stage
    assert operating.deployment["spec"]["template"] == template
    assert [pod["metadata"]["uid"] for pod in operating.api.of_kind("Pod")] == pods
    assert [entry.reason for entry in operating.status.history] == [
        "StageRaised", "StageRaised", "StageRaised", "StageLowered",
    ]  # fmt: skip


async def test_ready_waits_for_every_pod_to_confirm_the_document() -> None:
    operating = await started()
    one, _ = (pod["metadata"]["name"] for pod in operating.api.of_kind("Pod"))
    operating.sidecars.deaf.add(one)
    operating.edit(rollout={"stage": "Full"})
    await operating.run()
    assert operating.condition("Ready") == ("False", "AwaitingConfirmation")
    assert operating.status.generations[0].acknowledged_replicas == 1
    operating.sidecars.deaf.clear()
    operating.sidecars.scrape()
    await operating.run()
    assert operating.condition("Ready") == ("True", "Ready")
    assert operating.condition("Promoted") == ("True", "Full")


async def test_scrapes_are_fast_until_every_pod_has_confirmed() -> None:
    operating = await started()
    assert operating.sidecars.followed[KEY].every == 10
    operating.edit(rollout={"stage": "Full"})
    await operating.turn()
    assert operating.sidecars.followed[KEY].every == 1
    await operating.run()
    assert operating.sidecars.followed[KEY].every == 10


async def test_the_canary_widens_and_narrows() -> None:
    operating = await started(rollout={"stage": "Canary", "canary": {"percent": 5}})
    operating.edit(rollout={"canary": {"percent": 25}})
    await operating.run()
    assert operating.status.canary_percent == 25
    operating.edit(rollout={"canary": {"percent": 10}})
    await operating.run()
    assert operating.events[-3:] == ["CanaryStarted", "CanaryWidened", "RolledBack"]


async def test_a_pause_holds_a_raise_and_lets_a_lowering_through() -> None:
    operating = await started(rollout={"stage": "Canary", "canary": {"percent": 10}})
    operating.edit(rollout={"progress": "Paused"})
    await operating.run()
    assert operating.events[-1] == "RolloutPaused"
    operating.edit(rollout={"stage": "Full"})
    await operating.run()
    assert operating.status.stage == "Canary"
    assert operating.condition("Promoted") == ("False", "RolloutPaused")
    operating.edit(rollout={"stage": "Shadow"})
    await operating.run()
    assert operating.status.stage == "Shadow"
    operating.edit(rollout={"stage": "Full"})
    await operating.run()
    assert operating.status.stage == "Shadow"
    operating.edit(rollout={"progress": "Running"})
    await operating.run()
    assert operating.status.stage == "Full"
    assert operating.events.count("RolloutPaused") == 1


async def test_a_document_changed_by_hand_does_not_become_what_a_pause_holds() -> None:
    operating = await started(rollout={"stage": "Shadow", "progress": "Paused"})
    operating.edit(rollout={"stage": "Full"})
    await operating.run()
    body = operating.api.of_kind("ConfigMap")[0]
    document, _ = read_config_map(body)
    assert document is not None
    raised = msgspec.structs.replace(document, rollout=msgspec.structs.replace(document.rollout, stage="Full"))
    operating.api.put({**body, "data": {"document": msgspec.json.encode(raised).decode(), "version": "sha256:0"}})
    await operating.run()
    document, _ = read_config_map(operating.api.of_kind("ConfigMap")[0])
    assert document is not None
    assert document.rollout.stage == "Shadow"


async def test_the_cold_path_is_true_only_once_every_engine_has_confirmed_and_is_told_once() -> None:
    operating = await started(rollout={"stage": "Full"})
    one, _ = (pod["metadata"]["name"] for pod in operating.api.of_kind("Pod"))
    operating.sidecars.deaf.add(one)
    operating.edit(rollout={"killSwitch": "Engaged"})
    await operating.run()
    assert operating.condition("ColdPath") == ("Unknown", "Confirming")
    assert next(c.message for c in operating.status.conditions if c.type == "ColdPath") == "1 of 2 confirmed"
    assert "ColdPathEngaged" not in operating.events
    operating.sidecars.deaf.clear()
    operating.sidecars.scrape()
    await operating.run()
    assert operating.condition("ColdPath") == ("True", "Engaged")
    operating.restart()
    await operating.run()
    assert operating.condition("ColdPath") == ("True", "Engaged")
    operating.edit(rollout={"killSwitch": "Released"})
    await operating.run()
    assert operating.condition("ColdPath") == ("False", "Released")
    assert operating.events.count("ColdPathEngaged") == operating.events.count("ColdPathReleased") == 1


async def test_a_rejected_spec_leaves_everything_running_as_it_was() -> None:
    operating = await started(rollout={"stage": "Full"})
    before = {place: body for place, body in operating.api.objects.items() if place.kind in OWN_KINDS}
    operating.edit(cache={"capacity": "1Ki"}, rollout={"canary": {"percent": 3}}, rollover={"drainSeconds": 7})
    await operating.run()
    assert operating.condition("Accepted") == ("False", "CapacityTooSmall")
    assert operating.condition("Ready") == ("False", "CapacityTooSmall")
    assert operating.events[-1] == "PolicyRejected"
    assert {place: body for place, body in operating.api.objects.items() if place.kind in OWN_KINDS} == before
    operating.restart()
    await operating.run()
    assert {place: body for place, body in operating.api.objects.items() if place.kind in OWN_KINDS} == before
    assert operating.events.count("PolicyRejected") == 1


async def test_a_rejected_spec_may_still_lower_the_stage_engage_the_switch_and_scale() -> None:
    operating = await started(rollout={"stage": "Full"})
    operating.edit(cache={"capacity": "1Ki"}, rollout={"stage": "Shadow", "killSwitch": "Engaged"})
    operating.edit(engine={"replicas": 3})
    await operating.run()
    assert operating.condition("Accepted") == ("False", "CapacityTooSmall")
    assert operating.status.stage == "Shadow"
    assert operating.condition("ColdPath") == ("True", "Engaged")
    assert operating.deployment["spec"]["replicas"] == 3
    # A raise and a release wait for acceptance.
    operating.edit(rollout={"stage": "Full", "killSwitch": "Released"})
    operating.edit(cache={"capacity": "64Mi"})
    await operating.run()
    assert operating.status.stage == "Full"
    assert operating.condition("Accepted") == ("True", "Accepted")


async def test_a_policy_that_was_never_acceptable_makes_nothing() -> None:
    operating = Operating()
    operating.create(cache={"capacity": "1Ki"})
    await operating.run()
    assert {place.kind for place in operating.api.objects} == {"KVCachePolicy", "Event"}
    assert operating.condition("Accepted") == ("False", "CapacityTooSmall")
    assert operating.condition("Available") == ("Unknown", "NothingAccepted")
    operating.edit(cache={"capacity": "64Mi"})
    await operating.run()
    assert operating.condition("Ready") == ("True", "Ready")


@pytest.mark.parametrize("labelled", [True, False])
async def test_an_object_of_somebody_else_is_never_touched(labelled: bool) -> None:
    operating = Operating()
    labels = {"app.kubernetes.io/managed-by": "kvsteward-operator", "kvsteward.dev/policy": "chat"} if labelled else {}
    theirs = operating.api.put(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "serving", "labels": labels},
         "spec": {"ports": []}}
    )  # fmt: skip
    if not labelled:
        operating.index.remove(theirs)
    operating.create()
    await operating.run()
    assert operating.condition("Accepted") == ("False", "NameConflict")
    assert operating.api.find("Service", "chat") == theirs
    assert operating.api.of_kind("Deployment") == []
    operating.api.remove(theirs)
    await operating.run()
    assert operating.condition("Ready") == ("True", "Ready")


async def test_what_an_earlier_policy_of_the_name_left_is_waited_for() -> None:
    operating = await started()
    operating.api.remove(operating.policy)
    operating.create()
    await operating.turn()
    assert operating.condition("Available") == ("Unknown", "WaitingForCleanup")
    assert [call for call in operating.api.writes if call[0] == "apply"][-1][1] == "Deployment"  # of the first one
    operating.api.collect_garbage()
    await operating.run()
    assert operating.condition("Ready") == ("True", "Ready")


async def test_a_deleted_policy_is_left_to_garbage_collection() -> None:
    operating = await started()
    resource = operating.policy
    operating.api.put({**resource, "metadata": {**resource["metadata"], "deletionTimestamp": "2025-01-01T00:00:00Z"}})
    operating.api.remove(operating.api.of_kind("Service")[0])
    operating.api.calls.clear()
    await operating.turn()
    operating.api.remove(operating.policy)
    assert await operating.turn() is None
    assert operating.api.writes == []
    assert "finalizers" not in resource["metadata"]


async def test_a_spec_whose_pods_the_api_server_refuses_is_rejected_before_it_is_recorded() -> None:
    operating = await started()
    before = operating.deployment
    operating.api.refuse = lambda body: (
        "priority" if body["kind"] == "Deployment" and "bad" in str(body["spec"]["template"]) else None
    )
    operating.edit(engine={"template": {"runtimeClassName": "bad"}})
    await operating.run()
    assert operating.condition("Accepted") == ("False", "InvalidTemplate")
    assert operating.deployment == before
    assert len(operating.api.of_kind("ControllerRevision")) == 1


async def test_a_write_that_is_refused_is_told_in_the_status_and_tried_again() -> None:
    operating = Operating()
    operating.create()

    def forbid(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("apply", "RoleBinding"):
            raise errors.Refused(403, "rolebindings is forbidden")

    operating.api.fail = forbid
    with pytest.raises(errors.Refused):
        await operating.turn()
    assert operating.condition("Progressing") == ("False", "ApplyFailed")
    operating.api.fail = lambda verb, kind, name: None
    await operating.run()
    assert operating.condition("Ready") == ("True", "Ready")


async def test_a_status_made_from_an_old_reading_is_made_again() -> None:
    operating = await started()
    stale = operating.index.policy(KEY)
    operating.api.watchers.clear()
    operating.edit(rollout={"stage": "Full"})
    assert operating.index.policy(KEY) == stale
    operating.api.put({**operating.policy, "metadata": {**operating.policy["metadata"], "labels": {"x": "y"}}})
    operating.sidecars.changes = {
        pod["metadata"]["name"]: {"pool_tokens": 99999} for pod in operating.api.of_kind("Pod")
    }
    operating.sidecars.scrape()
    await operating.turn()
    assert operating.status.stage == "Full"
    assert operating.status.observed_generation == operating.policy["metadata"]["generation"]


async def test_a_mark_that_the_api_server_writes_in_another_way_is_not_applied_for_ever() -> None:
    operating = await started(engine={"resources": {"limits": {"memory": "2048Mi", "cpu": "1000m"}}})
    body = operating.deployment
    body["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = {"memory": "2Gi", "cpu": "1"}
    operating.api.put(body)
    operating.restart()
    operating.api.calls.clear()
    await operating.turn()
    assert [call for call in operating.api.writes if call[0] == "apply"] == []


async def test_the_operator_may_be_killed_after_any_call_and_ends_in_the_same_state() -> None:
    undisturbed = await started(rollout={"stage": "Full"})

    class Killed(BaseException):
        pass

    for survives in range(1, 60):
        operating = Operating()
        operating.create(rollout={"stage": "Full"})
        left = survives

        def kill(verb: str, kind: str, name: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed

        operating.api.fail = kill
        try:
            await operating.run()
            break
        except Killed:
            operating.api.fail = lambda verb, kind, name: None
            operating.restart()
            await operating.run()
        assert operating.status.stage == "Full"
        assert sorted(set(operating.events)) == sorted(operating.events)
        assert set(operating.events) == set(undisturbed.events)
        assert {place for place in operating.api.objects if place.kind in OWN_KINDS} == {
            place for place in undisturbed.api.objects if place.kind in OWN_KINDS
        }
        assert operating.condition("Ready") == ("True", "Ready")
    else:
        pytest.fail("the run never finished")


async def test_events_of_a_status_whose_writer_died_are_told_by_the_next_one() -> None:
    operating = await started()

    def dead(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "Event"):
            raise errors.Unavailable(0, "connection lost")

    operating.api.fail = dead
    operating.edit(rollout={"stage": "Full"})
    with pytest.raises(errors.Unavailable):
        await operating.turn()
    assert "Promoted" not in operating.events
    operating.api.fail = lambda verb, kind, name: None
    operating.restart()
    await operating.run()
    assert operating.events.count("Promoted") == 1


async def test_events_older_than_ten_minutes_are_not_told_again() -> None:
    operating = await started()
    for body in operating.api.of_kind("Event"):
        operating.api.remove(body)
    operating.now += 601
    operating.restart()
    await operating.run()
    assert operating.events == []


async def test_replicas_follow_the_resource_and_zero_is_allowed() -> None:
    operating = await started()
    operating.edit(engine={"replicas": 0})
    await operating.run()
    assert operating.deployment["spec"]["replicas"] == 0
    assert operating.condition("Available") == ("True", "ScaledToZero")
    assert operating.condition("Ready") == ("True", "Ready")
    assert operating.status.replicas == 0
    operating.edit(engine={"replicas": 3})
    await operating.run()
    assert operating.status.replicas == 3
    assert len(operating.api.of_kind("ControllerRevision")) == 1  # replicas are no part of what was accepted


async def test_an_index_that_missed_a_deletion_is_put_right_by_the_turn_that_trips_over_it() -> None:
    operating = await started()
    operating.api.watchers.clear()
    gone = operating.api.of_kind("Service")[0]
    operating.api.remove(gone)
    # Something of the Service has to be applied for the turn to notice.
    operating.index.put({**gone, "spec": {}, "metadata": {**gone["metadata"], "resourceVersion": "99999"}})
    await operating.turn()
    assert operating.api.find("Service", "chat") is not None
    assert operating.index.get(Place("Service", "serving", "chat")) is not None


async def test_a_new_generation_starts_from_what_a_pause_holds() -> None:
    operating = await started(rollout={"stage": "Shadow"})
    operating.edit(rollout={"progress": "Paused"})
    await operating.run()
    operating.edit(rollout={"stage": "Cold"})
    await operating.run()
    operating.edit(rollout={"stage": "Full"}, engine={"model": {"revision": "2"}})
    await operating.run()
    assert [(one.model_revision, one.stage) for one in operating.status.generations] == [("2", "Cold")]


async def test_an_event_whose_condition_has_moved_on_before_the_restart_is_told_all_the_same() -> None:
    operating = Operating()
    operating.create()

    def dead(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "Event"):
            raise errors.Unavailable(0, "connection lost")

    operating.api.fail = dead
    with pytest.raises(errors.Unavailable):
        await operating.turn()
    operating.workloads.settle()
    operating.api.fail = lambda verb, kind, name: None
    operating.restart()
    await operating.turn()
    assert operating.condition("Available") == ("True", "PodsReady")
    assert "PodsCreated" in operating.events


async def test_figures_that_change_all_the_time_are_not_written_by_themselves() -> None:
    operating = await started()
    writes = len(operating.api.writes)
    for in_flight in range(1, 5):
        operating.sidecars.changes = {
            pod["metadata"]["name"]: {"in_flight": in_flight, "resident_pages": 100}
            for pod in operating.api.of_kind("Pod")
        }
        operating.sidecars.scrape()
        await operating.turn()
    assert len(operating.api.writes) == writes
    operating.edit(rollout={"stage": "Full"})
    await operating.turn()
    assert [(one.in_flight, one.resident_pages) for one in operating.status.generations] == [(8, 200)]


async def test_an_object_that_took_the_name_of_one_of_ours_unseen_is_not_touched() -> None:
    operating = await started()
    ours = operating.api.of_kind("Service")[0]
    operating.api.watchers.clear()
    operating.api.remove(ours)
    theirs = operating.api.put(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "serving"}, "spec": {"x": 1}}
    )
    # All that the operator has seen is that its own Service was changed.
    version = str(int(ours["metadata"]["resourceVersion"]) + 1)
    operating.index.put({**ours, "spec": {}, "metadata": {**ours["metadata"], "resourceVersion": version}})
    await operating.turn()
    assert operating.api.find("Service", "chat") == theirs
    assert operating.condition("Accepted") == ("False", "NameConflict")


async def test_a_pod_that_only_bears_the_label_is_neither_counted_nor_asked() -> None:
    operating = await started()
    pod = operating.api.of_kind("Pod")[0]
    bare = {name: value for name, value in pod["metadata"].items() if name not in ("ownerReferences", "uid")}
    operating.api.put({**pod, "metadata": {**bare, "name": "stranger"}})
    await operating.turn()
    assert operating.status.replicas == 2
    assert "stranger" not in [followed.name for followed in operating.sidecars.followed[KEY].pods]
