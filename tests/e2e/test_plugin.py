"""`kubectl kvcache` as whoever is on call runs it: the installed plugin, through kubectl, on a policy that serves."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from kvsteward_bench.traffic import ask, session
from support.kube import until
from support.proof import record

pytestmark = pytest.mark.cluster

SCRIPTS = Path(sys.executable).parent  # where pip puts kubectl-kvcache


@pytest.fixture(scope="module")
def chat(tiny_policy):
    return tiny_policy("plugin", engine={"replicas": 2, "maxConcurrent": 8})


@pytest.fixture(autouse=True)
async def at_full(chat):
    """Every test begins with a released switch, at Full."""
    await chat.edit(killSwitch="Released", progress="Running", stage="Full", canary={"percent": 0})
    await released(chat)
    await chat.in_force("Full")


async def released(chat, timeout=60):
    async with asyncio.timeout(timeout):
        while any(each["coldRequested"] for each in await asyncio.to_thread(chat.observations)):
            await asyncio.sleep(0.1)


async def kvcache(*words, namespace="serving", kubeconfig=None):
    """What the plugin did: returncode, stdout, stderr."""
    environment = os.environ | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    if kubeconfig is not None:
        environment["KUBECONFIG"] = str(kubeconfig)
    command = ["kubectl", "kvcache", *words, "--namespace", namespace]
    return await asyncio.to_thread(
        subprocess.run, command, env=environment, text=True, capture_output=True, check=False, timeout=120
    )


async def done(*words, **options):
    """The same, for what has to succeed: its JSON."""
    ran = await kvcache(*words, "--output", "json", **options)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


async def pods(chat):
    return sorted(pod["metadata"]["name"] for pod in await asyncio.to_thread(chat.kube.pods, chat.name))


async def settled(chat):
    """Until the operator has seen the spec as it is and all is in force."""
    await asyncio.to_thread(chat.kube.wait_for, chat.name, "Ready", "True", 60)


async def test_status_shows_what_is_in_force(chat):
    await settled(chat)
    told = await done("status", chat.name)
    serving = [one for one in told["generations"] if one["state"] == "Serving"]
    assert (told["stage"], told["current"], serving[0]["acknowledgedReplicas"]) == ("Full", True, 2)
    text = (await kvcache("status", chat.name)).stdout
    assert re.search(rf"^{serving[0]['name']} +Serving +Full +- +2 +2 ", text, re.MULTILINE)
    for kind in ("Accepted", "Available", "Progressing", "Promoted", "ColdPath", "Degraded", "Ready"):
        assert re.search(rf"^{kind} +(True|False) ", text, re.MULTILINE), text
    assert re.search(rf"^{chat.name} +Full ", (await kvcache("status")).stdout, re.MULTILINE)


async def test_kill_wait_under_load_shows_each_pods_last_match_and_nothing_matches_after_it(chat):
    load = chat.load(24, max_tokens=64)
    async with load.running():
        await load.wait_for(40)
        begun = time.time()
        ran = await kvcache("kill", chat.name, "--wait", "-o", "json")
        ended = time.time()
        await load.wait_for(30)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["confirmed"]
    assert [one["name"] for one in sorted(told["pods"], key=lambda one: one["name"])] == await pods(chat)
    assert all(one["confirmed"] and one["lastMatch"] for one in told["pods"]), told["pods"]
    assert any(answer.cached_tokens for answer in load.answers if answer.ended < begun), "nothing was reused before"
    late = [answer for answer in load.answers if answer.started > ended and answer.cached_tokens]
    failed = [answer for answer in load.answers if not answer.complete]
    assert (late, failed) == ([], [])
    record("plugin-kill", "kubectl kvcache kill --wait under load, start of the process to its end", {
        "seconds": round(ended - begun, 2),
        "pods": len(told["pods"]),
        "newestMatchSecondsAgo": min(one["lastMatchSecondsAgo"] for one in told["pods"]),
    })  # fmt: skip
    released_ = await done("release", chat.name)
    assert released_["changes"] == [{"field": "rollout.killSwitch", "from": "Engaged", "to": "Released"}]
    await released(chat)


async def test_kill_wait_needs_no_operator_and_releasing_what_it_has_seen_does(chat, system):
    await asyncio.to_thread(system.scale, "kvsteward", 0)
    try:
        ran = await kvcache("kill", chat.name, "--wait")
        assert ran.returncode == 0, ran.stderr
        for pod in await pods(chat):
            assert re.search(rf"^{pod} +yes ", ran.stdout, re.MULTILINE)
        await asyncio.to_thread(system.scale, "kvsteward", 1)
        await asyncio.to_thread(chat.kube.wait_for, chat.name, "ColdPath", "True", 60)
        await settled(chat)
        await asyncio.to_thread(system.scale, "kvsteward", 0)
        await done("release", chat.name)
        await asyncio.sleep(2)
        assert all(each["coldRequested"] for each in await asyncio.to_thread(chat.observations))
    finally:
        await asyncio.to_thread(system.scale, "kvsteward", 1)
    await released(chat)


async def test_kill_wait_names_the_pod_that_does_not_answer(chat):
    stuck, fine = await pods(chat)
    await asyncio.to_thread(chat.kube.kill, stuck, "sidecar", "STOP")
    try:
        begun = time.monotonic()
        ran = await kvcache("kill", chat.name, "--wait")
        assert ran.returncode == 1
        assert time.monotonic() - begun < 15
        assert f"1 of 2 pods have not confirmed within 5 s: {stuck} (" in ran.stderr
        assert fine not in ran.stderr
        assert re.search(rf"^{fine} +yes ", ran.stdout, re.MULTILINE)
    finally:
        await asyncio.to_thread(chat.kube.kill, stuck, "sidecar", "CONT")
    ran = await kvcache("kill", chat.name, "--wait", "--timeout", "30")
    assert ran.returncode == 0, ran.stderr


async def test_a_request_is_found_as_receipt_and_as_pages(chat):
    tokens = [3 + (977 + 7 * position) % 250 for position in range(200)]
    async with session(connections=1) as client:
        answers = [
            await ask(client, chat.url, tokens, model=chat.model, key=chat.keys["acme"], max_tokens=8) for _ in range(3)
        ]
    answer = answers[-1]
    assert answer.cached_tokens == 192
    one = await done("receipts", chat.name, "--id", answer.receipt)
    assert (one["id"], one["reusedTokens"], one["decision"]) == (answer.receipt, 192, "Reuse")
    assert one["pod"] in await pods(chat)
    text = (await kvcache("receipts", chat.name, "--limit", "5")).stdout
    assert re.search(rf" Reuse .* 192 .*{answer.receipt}$", text, re.MULTILINE)
    told = await done("ledger", chat.name, "--limit", "5000")
    ours = [page for page in told["items"] if page["pod"] == one["pod"] and page["uses"] > 0]
    assert len(ours) >= 12, "200 tokens fill 12 pages of 16"
    assert "acme" not in json.dumps([one, told]) and chat.token not in text


async def test_promote_goes_up_step_by_step_and_a_pause_holds_it(chat):
    await chat.stage("Shadow")
    await chat.edit(canary={"percent": 25})
    await settled(chat)
    assert (await done("promote", chat.name))["changes"][0]["to"] == "Canary"
    await chat.in_force("Canary", 25)
    await settled(chat)
    await done("pause", chat.name)
    await settled(chat)
    ran = await kvcache("promote", chat.name)
    assert (ran.returncode, "waits for `resume`" in ran.stderr) == (0, True), ran.stderr
    await asyncio.sleep(2)
    await chat.in_force("Canary", 25)
    await done("resume", chat.name)
    await chat.in_force("Full", 25)
    ran = await kvcache("promote", chat.name)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"kubectl kvcache: {chat.name} is at Full: there is no stage beyond it\n"


async def test_rollback_restores_the_spec_before_but_not_the_replicas(chat):
    await settled(chat)
    before = (await asyncio.to_thread(chat.kube.policy, chat.name))["spec"]
    restarts = await asyncio.to_thread(chat.restarts)
    edit = {"spec": {"scopes": {"private": {"quotaPercent": 41}}, "rollout": {"stage": "Shadow"}}}
    await asyncio.to_thread(chat.kube.patch, "kvcp", chat.name, edit)
    await settled(chat)
    tried = await done("rollback", chat.name, "--dry-run")
    changes = [
        {"field": "rollout.stage", "from": "Shadow", "to": "Full"},
        {"field": "scopes.private.quotaPercent", "from": 41, "to": before["scopes"]["private"]["quotaPercent"]},
    ]
    assert tried["changes"] == changes
    assert (await asyncio.to_thread(chat.kube.policy, chat.name))["spec"]["rollout"]["stage"] == "Shadow"
    listed = (await done("rollback", chat.name, "--list"))["items"]
    assert tried["revision"] in [one["revision"] for one in listed if one["changes"] == changes]
    assert (await done("rollback", chat.name))["changes"] == changes
    await chat.in_force("Full")
    await settled(chat)
    assert (await asyncio.to_thread(chat.kube.policy, chat.name))["spec"] == before
    assert await asyncio.to_thread(chat.restarts) == restarts
    ran = await kvcache("rollback", chat.name, "--to-revision", "100000")
    assert (ran.returncode, "has no revision 100000; kept are" in ran.stderr) == (1, True)


def kubeconfig_of(chat, folder, role):
    """A kubeconfig of a service account that has a role of the cluster in the namespace, by token."""
    kube, account = chat.kube, f"on-call-{role}"
    kube.kubectl("create", "serviceaccount", account)
    subject = f"--serviceaccount={kube.namespace}:{account}"
    kube.kubectl("create", "rolebinding", account, f"--clusterrole={role}", subject)
    config = yaml.safe_load(kube.kubectl("config", "view", "--raw", "--flatten"))
    config["users"] = [{"name": "on-call", "user": {"token": kube.kubectl("create", "token", account).strip()}}]
    for context in config["contexts"]:
        context["context"]["user"] = "on-call"
    file = folder / role
    file.write_text(yaml.safe_dump(config))
    return file


async def test_an_editor_may_do_it_and_a_viewer_is_told_in_one_sentence(chat, tmp_path):
    try:
        editor = await asyncio.to_thread(kubeconfig_of, chat, tmp_path, "edit")
        viewer = await asyncio.to_thread(kubeconfig_of, chat, tmp_path, "view")
        await asyncio.to_thread(
            until, "the viewer's rights", lambda: chat.kube.kubectl("get", "kvcp", "--kubeconfig", str(viewer)), 30
        )
        assert (await done("status", chat.name, kubeconfig=viewer))["stage"] == "Full"
        ran = await kvcache("kill", chat.name, "--wait", kubeconfig=viewer)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
        assert ran.stderr.startswith("kubectl kvcache: you may not do this: ")
        told = await done("kill", chat.name, "--wait", kubeconfig=editor)
        assert told["confirmed"] and len(told["pods"]) == 2
        assert (await done("ledger", chat.name, kubeconfig=editor))["total"] >= 0
        await done("release", chat.name, kubeconfig=editor)
    finally:
        for role in ("edit", "view"):
            for kind in ("rolebinding", "serviceaccount"):
                await asyncio.to_thread(chat.kube.delete, kind, f"on-call-{role}")


@pytest.mark.parametrize(
    ("words", "namespace", "status", "said"),
    [
        pytest.param(["status", "nobody"], "serving", 1, "'nobody' was not found in this namespace", id="no-policy"),
        pytest.param(["kill", "plugin", "--wait"], "nowhere", 1, "was not found in this namespace", id="no-namespace"),
        pytest.param(["status", "plugin", "--context", "elsewhere"], "serving", 1, "no cluster: ", id="no-context"),
    ],
)
async def test_what_is_not_there_is_one_sentence(chat, words, namespace, status, said):
    ran = await kvcache(*words, namespace=namespace)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (status, "", 1)
    assert said in ran.stderr
