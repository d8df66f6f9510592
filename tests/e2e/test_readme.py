"""The README's own commands for one's own cluster, run as they stand there.

Replaced is only what a reader replaces (image references), and what keeps them apart from this run's other operator:
the release's name and namespace, and which namespace it watches.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support import manifests
from support.kube import Kube, until

pytestmark = [pytest.mark.cluster, pytest.mark.model]
ROOT = Path(__file__).parents[2]
NAMESPACE, SYSTEM = "readme", "readme-system"
OURS = {
    **{f"REGISTRY/{part}:TAG": f"localhost/kvsteward-{part}:dev" for part in ("operator", "sidecar", "engine")},
    "helm install kvsteward charts/kvsteward": "helm install readme charts/kvsteward",
    "--namespace kvsteward-system": f"--set watch.namespaces='{{{NAMESPACE}}}' --wait --namespace {SYSTEM}",
}


def blocks(heading: str) -> list[str]:
    """The shell blocks of one section of the README."""
    text = (ROOT / "README.md").read_text()
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def follow(block: str, env: dict[str, str]) -> str:
    """Run a block, as typed line by line: the first command that fails ends it."""
    for theirs, ours in OURS.items():
        block = block.replace(theirs, ours)
    done = subprocess.run(
        ["bash", "-euc", block], cwd=ROOT, env=env, text=True, capture_output=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def reader(system: Kube, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody whose kubectl stands in a namespace of theirs that has the claim `models`."""
    kube = Kube(NAMESPACE)
    kube.apply(manifests.namespace(NAMESPACE))
    until("default service account", lambda: kube.exists("serviceaccount", "default"))
    kube.apply(*manifests.models(NAMESPACE, ROOT / ".cache/models"))
    config = tmp_path / "kubeconfig"
    config.write_text(Path(os.environ["KUBECONFIG"]).read_text())
    env = {**os.environ, "KUBECONFIG": str(config)}
    subprocess.run(["kubectl", "config", "set-context", "--current", f"--namespace={NAMESPACE}"], env=env, check=True)
    return env


def test_the_readmes_way_from_install_to_roll_back_works(reader: dict[str, str]) -> None:
    kube = Kube(NAMESPACE)
    install, first_policy, edits = blocks("On your own cluster")
    try:
        follow(install, reader)
        assert "support-chat" in follow(first_policy, reader)
        follow(edits, reader)
        kube.wait_for("support-chat", "Ready", timeout=60)
        until("stage Shadow", lambda: kube.policy("support-chat")["status"].get("stage") == "Shadow")
        reasons = kube.reasons("support-chat")
        assert {"PolicyAccepted", "PodsCreated", "Promoted", "ColdPathEngaged", "ColdPathReleased"} <= set(reasons)
    finally:
        kube.delete("kvcp", "support-chat", wait=False)
        Kube(SYSTEM).helm("uninstall", "readme", "--wait", "--ignore-not-found")
        until("pods gone", lambda: not kube.pods("support-chat", leaving=True), timeout=120)
