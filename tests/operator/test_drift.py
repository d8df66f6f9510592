"""What counts as different between what is wanted and what is there."""

from typing import Any

import pytest
from kvsteward_operator.drift import holds, mark_of, marked, spoilt_lists
from support.operating import Operating


@pytest.mark.parametrize(
    ("desired", "live", "same"),
    [
        pytest.param({"a": 1}, {"a": 1, "b": 2}, True, id="fields of others are let be"),
        pytest.param({"a": 1}, {}, False, id="a field that went missing"),
        pytest.param({"a": {"b": 1}}, {"a": None}, False, id="an object that went missing"),
        pytest.param({"l": [1, 2]}, {"l": [1, 2, 3]}, False, id="a longer plain list"),
        pytest.param({"l": [{"name": "a"}]}, {"l": [{"name": "b"}, {"name": "a", "x": 1}]}, True, id="named items"),
        pytest.param({"l": [{"name": "a", "v": 1}]}, {"l": [{"name": "a", "v": 2}]}, False, id="a changed named item"),
        pytest.param({"l": [{"name": "a"}]}, {"l": [{"name": "b"}]}, False, id="a missing named item"),
        pytest.param({"l": [{"p": 1}]}, {"l": [{"p": 1}, {"p": 2}]}, False, id="a longer list of unnamed items"),
        pytest.param({"l": [1]}, {"l": "1"}, False, id="text for a list"),
        pytest.param({"limits": {"memory": "2048Mi"}}, {"limits": {"memory": "2Gi"}}, True, id="memory, respelt"),
        pytest.param({"requests": {"cpu": "1000m"}}, {"requests": {"cpu": "1"}}, True, id="cpu, respelt"),
        pytest.param({"limits": {"memory": "2Gi"}}, {"limits": {"memory": "3Gi"}}, False, id="another amount"),
        pytest.param({"limits": {"memory": "2Gi"}}, {"limits": {"memory": "lots"}}, False, id="no amount"),
        pytest.param({"memory": "2048Mi"}, {"memory": "2Gi"}, False, id="amounts only where amounts are"),
    ],
)
def test_holds(desired: Any, live: Any, same: bool) -> None:
    assert holds(desired, live) is same


def test_a_mark_tells_a_field_that_is_not_wanted_any_more() -> None:
    body = {"metadata": {"name": "x"}, "spec": {"a": 1, "b": 2}}
    before, after = marked(body), marked({**body, "spec": {"a": 1}})
    assert holds(after["spec"], before["spec"])
    assert mark_of(before) != mark_of(after)
    assert not holds(after, before)
    assert "annotations" not in body["metadata"]


def test_spoilt_lists_are_found_by_their_pointer() -> None:
    desired = {"metadata": {"annotations": {"a/b~c": "x"}}, "spec": {"ports": [{"name": "http", "port": 1}], "n": 1}}
    live = {"metadata": {"annotations": {}}, "spec": {"ports": [{"name": "http", "port": 2}], "n": 2}}
    assert spoilt_lists(desired, live) == {"/spec/ports": desired["spec"]["ports"]}
    assert spoilt_lists(desired, desired) == {}


async def test_a_list_that_others_have_spoilt_so_that_ours_is_refused_is_replaced() -> None:
    operating = Operating()
    operating.create()
    await operating.run()
    good = operating.api.of_kind("Service")[0]

    def two_of_a_name(body: Any) -> str | None:
        live = operating.api.find(body["kind"], body["metadata"]["name"])
        spoilt = body["kind"] == "Service" and live is not None and live["spec"]["ports"][0]["port"] == 81
        return "spec.ports[1].name: Duplicate value" if spoilt else None

    operating.api.refuse = two_of_a_name
    operating.api.put({**good, "spec": {**good["spec"], "ports": [{"name": "http", "port": 81}]}})
    await operating.turn()
    assert operating.api.of_kind("Service")[0]["spec"] == good["spec"]
    assert operating.condition("Progressing") == ("False", "Complete")
