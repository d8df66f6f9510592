"""A cluster with the operator installed as the README says, and a namespace for policies."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import manifests
from support.deployed import Deployed
from support.kube import Kube, until
from support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
SYSTEM, SERVING = "kvsteward-system", "serving"
IMAGES = {part: f"localhost/kvsteward-{part}:dev" for part in ("operator", "sidecar", "engine")}


@pytest.fixture(scope="session")
def system() -> Kube:
    """The operator's namespace, the CRD applied and the chart installed, for the policies of namespace `serving`
    alone: other tests run operators of their own in other namespaces."""
    kube = Kube(SYSTEM)
    kube.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    kube.kubectl("wait", "--for=condition=Established", "crd/kvcachepolicies.kvsteward.dev", "--timeout=30s")
    kube.apply(manifests.namespace(SYSTEM), manifests.namespace(SERVING))
    sets = [word for part, image in IMAGES.items() for word in ("--set", f"image.{part}={image}")]
    chart = str(ROOT / "charts" / "kvsteward")
    sets += ["--set", f"watch.namespaces={{{SERVING}}}"]
    kube.helm("upgrade", "--install", "kvsteward", chart, "--wait", "--timeout=180s", *sets)
    return kube


@dataclass(frozen=True)
class Serving:
    """A namespace in which policies run, and the API keys of its tenants."""

    kube: Kube
    keys: dict[str, str]


@pytest.fixture(scope="session")
def serving(system: Kube) -> Serving:
    """Namespace `serving`, restricted, with the checkpoints in claim `models` and keys for three tenants."""
    found = Serving(Kube(SERVING), {tenant: secrets.token_urlsafe(32) for tenant in ("acme", "globex", "rotating")})
    until("default service account", lambda: found.kube.exists("serviceaccount", "default"))
    found.kube.apply(*manifests.models(SERVING, ROOT / ".cache" / "models"), manifests.tenant_keys(found.keys))
    return found


@pytest.fixture
def make_policy(serving: Serving) -> Iterator[Callable[..., str]]:
    """Apply a policy, wait until it is Ready, give its name; deleted with its pods after the test."""
    made: list[str] = []

    def make(name: str, *, wait: bool = True, **changes: Any) -> str:
        made.append(name)
        serving.kube.apply(manifests.policy(name, **changes))
        if wait:
            serving.kube.wait_for(name, "Ready", timeout=240)
        return name

    yield make
    for name in made:
        serving.kube.delete("kvcp", name)
    for name in made:
        until(f"pods of {name} gone", lambda name=name: not serving.kube.pods(name, leaving=True), timeout=120)


@pytest.fixture(scope="module")
def tiny_policy(serving: Serving) -> Iterator[Callable[..., Deployed]]:
    """Policies over the tiny checkpoint, Ready, at stage Full; all of a module's are deleted after it."""
    make_tiny_model(ROOT / ".cache" / "models" / "tiny")
    made: list[str] = []

    def make(name: str, **changes: Any) -> Deployed:
        made.append(name)
        serving.kube.apply(manifests.policy(name, path="tiny", model="tiny", **changes))
        serving.kube.wait_for(name, "Ready", timeout=240)
        return Deployed(serving.kube, name, "tiny", serving.keys)

    yield make
    for name in made:
        serving.kube.delete("kvcp", name, wait=False)
    for name in made:
        until(f"pods of {name} gone", lambda name=name: not serving.kube.pods(name, leaving=True), timeout=120)
