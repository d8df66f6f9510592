"""A cluster as a person sees it: kubectl, in small verbs. Tests run under `tests/cluster/cluster exec`, which puts
them into the cluster's network with kubectl, helm and KUBECONFIG at hand, so Services and pods answer by address."""

import base64
import functools
import json
import os
import subprocess
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config

Json = dict[str, Any]
POLICY_LABEL = "kvsteward.dev/policy"


class KubectlFailed(Exception):
    """What kubectl or helm said."""


class NotWithin(AssertionError):
    """Something did not come true in time; the text has what there was instead."""


def run(*argv: str, given: str | None = None, timeout: float = 120) -> str:
    """What a command prints. Raises KubectlFailed."""
    done = subprocess.run(argv, input=given, text=True, capture_output=True, check=False, timeout=timeout)
    if done.returncode:
        raise KubectlFailed(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def until(what: str, look: Callable[[], Any], timeout: float = 60, pause: float = 0.1) -> Any:
    """The first truthy answer of look(). What kubectl refuses meanwhile counts as not yet. Raises NotWithin."""
    end = time.monotonic() + timeout
    last: Any = None
    while time.monotonic() < end:
        try:
            if last := look():
                return last
        except (KubectlFailed, OSError) as error:
            last = error
        time.sleep(pause)
    raise NotWithin(f"{what}: not within {timeout:.0f} s, at last {last!r}")


class Kube:
    """One namespace of the cluster."""

    def __init__(self, namespace: str = "default") -> None:
        self.namespace = namespace

    def kubectl(self, *args: str, given: str | None = None, timeout: float = 120) -> str:
        return run("kubectl", "--namespace", self.namespace, *args, given=given, timeout=timeout)

    def helm(self, *args: str, timeout: float = 300) -> str:
        return run("helm", "--namespace", self.namespace, *args, timeout=timeout)

    def apply(self, *manifests: Json | Path) -> None:
        """Files, or objects as they are. Raises KubectlFailed with what the API server objects to."""
        for file in manifests:
            if isinstance(file, Path):
                self.kubectl("apply", "-f", str(file))
        objects = [manifest for manifest in manifests if not isinstance(manifest, Path)]
        if objects:
            self.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(objects))

    def get(self, what: str, name: str = "", selector: str = "") -> Json:
        """An object, or a list with `items`."""
        args = [what, *([name] if name else []), *(["-l", selector] if selector else [])]
        found: Json = json.loads(self.kubectl("get", *args, "-o", "json"))
        return found

    def items(self, what: str, selector: str = "") -> list[Json]:
        found: list[Json] = self.get(what, selector=selector)["items"]
        return found

    def exists(self, what: str, name: str) -> bool:
        return bool(self.kubectl("get", what, name, "--ignore-not-found", "-o", "name").strip())

    def patch(self, what: str, name: str, change: Json, subresource: str = "") -> None:
        extra = [f"--subresource={subresource}"] if subresource else []
        self.kubectl("patch", what, name, "--type=merge", "-p", json.dumps(change), *extra)

    def delete(self, what: str, name: str, *, wait: bool = True) -> None:
        self.kubectl("delete", what, name, "--ignore-not-found", f"--wait={str(wait).lower()}", timeout=300)

    def scale(self, deployment: str, replicas: int) -> None:
        """Until that many pods are available, and none that is going still does anything."""
        self.kubectl("scale", f"deployment/{deployment}", f"--replicas={replicas}")
        self.kubectl("rollout", "status", f"deployment/{deployment}", "--timeout=90s")
        chosen = self.get("deployment", deployment)["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{name}={value}" for name, value in chosen.items())
        until(f"{replicas} pods of {deployment}", lambda: len(self.items("pods", selector)) == replicas)

    def logs(self, pod: str, container: str, *args: str) -> str:
        return self.kubectl("logs", pod, "-c", container, *args)

    def kill(self, pod: str, container: str, signal: str = "KILL") -> None:
        """End a container's first process from the node, where even KILL reaches it."""
        status = self.get("pod", pod)["status"]
        every = status.get("containerStatuses", []) + status.get("initContainerStatuses", [])
        ident = next(each["containerID"] for each in every if each["name"] == container).removeprefix("containerd://")
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and ident in _read(f"/proc/{pid}/cgroup")]
        if not pids:
            raise NotWithin(f"container {container} of {pod} has no process on this machine")
        first = min(pids, key=lambda pid: int(_read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[19]))
        run("kill", f"-{signal}", first)

    # --- a policy and its pods

    def policy(self, name: str) -> Json:
        return _read_object(f"/apis/kvsteward.dev/v1alpha1/namespaces/{self.namespace}/kvcachepolicies/{name}")

    def rollout(self, name: str, **fields: Any) -> None:
        """Edit fields of spec.rollout, by their names in the resource."""
        self.patch("kvcp", name, {"spec": {"rollout": fields}})

    def condition(self, name: str, type_: str) -> Json:
        """One condition of a policy, {} when it has none of that type."""
        conditions = self.policy(name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == type_), {})

    def wait_for(self, name: str, type_: str, status: str = "True", timeout: float = 120) -> Json:
        """A condition of the spec as it stands now, once it has this status."""

        def look() -> Json | None:
            policy = self.policy(name)
            for each in policy.get("status", {}).get("conditions", []):
                current = each.get("observedGeneration") == policy["metadata"]["generation"]
                if each["type"] == type_ and each["status"] == status and current:
                    return dict(each)
            return None

        try:
            return dict(until(f"{type_}={status} of policy {name}", look, timeout))
        except NotWithin as error:
            raise NotWithin(f"{error}\nstatus: {json.dumps(self.policy(name).get('status', {}), indent=1)}") from None

    def pods(self, policy: str, *, leaving: bool = False) -> list[Json]:
        """Pods of a policy, without those that are being deleted unless asked for."""
        selector = urllib.parse.quote(f"{POLICY_LABEL}={policy}")
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}"
        found: list[Json] = _read_object(path)["items"]
        return [pod for pod in found if leaving or "deletionTimestamp" not in pod["metadata"]]

    def endpoint(self, policy: str) -> str:
        """URL of a policy's Service, by its cluster address."""
        service = self.get("service", policy)
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def admin(self, pod: Json) -> str:
        """URL of a pod's admin port."""
        return f"http://{pod['status']['podIP']}:9901"

    def admin_token(self, policy: str) -> str:
        data = self.get("secret", f"{policy}-kvsteward")["data"]
        return base64.b64decode(data["admin-token"]).decode()

    def reasons(self, name: str) -> list[str]:
        """Reasons of a policy's Events, oldest first."""
        found = self.items("events")
        about = [each for each in found if (each.get("involvedObject") or {}).get("name") == name]
        return [each["reason"] for each in sorted(about, key=lambda each: each["metadata"]["creationTimestamp"])]


@functools.cache
def _client() -> client.ApiClient:
    return config.new_client_from_config()


def _read_object(path: str) -> Json:
    """What is looked at again and again comes straight from the API server: a kubectl takes a tenth of a second of a
    core each time, which the pods under test need. Raises KubectlFailed, as kubectl would."""
    api = _client()
    try:
        answer = api.call_api("GET", api.configuration.host + path, {"Accept": "application/json"}, _request_timeout=30)
        answer.read()
    except (client.ApiException, urllib3.exceptions.HTTPError) as error:
        raise KubectlFailed(f"GET {path}: {error}") from None
    if answer.status != 200:
        raise KubectlFailed(f"GET {path}: {answer.status} {answer.data.decode(errors='replace')}")
    found: Json = json.loads(answer.data)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
