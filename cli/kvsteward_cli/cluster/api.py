"""The cluster, through the official client: the one module that talks to Kubernetes.

Bodies are plain JSON objects. Everything that goes wrong is a CommandFailed with one sentence for a person.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import urllib3
import yaml
from kubernetes import client, config, dynamic
from kubernetes.stream import ws_client
from kvsteward_contract import wire

from kvsteward_cli.errors import CommandFailed

Object = dict[str, Any]
FIELD_MANAGER = "kubectl-kvcache"
TIMEOUT = (5, 15)  # seconds to connect, and to answer
PAGE = 500
SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NotFound(CommandFailed):
    """The object isn't there."""


class Unreachable(CommandFailed):
    """The API server did not answer."""


class Conflict(Exception):
    """The object has changed since it was read: read it again, and decide again."""


class PodSilent(Exception):
    """A pod's admin port gave no answer; says why."""


class Cluster(Protocol):
    """What the commands need of a cluster, in one namespace."""

    namespace: str

    def policy(self, name: str) -> Object:
        """Raises NotFound, CommandFailed."""
        ...

    def policies(self, *, everywhere: bool = False) -> list[Object]: ...

    def patch(self, name: str, operations: Sequence[Mapping[str, Any]], *, dry_run: bool = False) -> Object:
        """A JSON patch of a policy; the policy as it is then. Raises NotFound, Conflict, CommandFailed."""
        ...

    def revisions(self, name: str) -> list[Object]:
        """ControllerRevisions under the policy's label."""
        ...

    def pods(self, policy: Object) -> list[Object]:
        """Pods whose owners end in the policy: a label alone proves nothing, and they get to see the admin token."""
        ...

    def admin_token(self, name: str) -> str: ...

    def ask(self, pod: str, path: str, token: str, seconds: float) -> tuple[int, bytes]:
        """GET on the pod's admin port: status and body. Raises PodSilent."""
        ...


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> KubernetesCluster:
    """As kubectl finds a cluster: --kubeconfig, KUBECONFIG, ~/.kube/config, else the pod it runs in.

    Raises CommandFailed.
    """
    configuration = client.Configuration()
    try:
        config.load_kube_config(kubeconfig, context, client_configuration=configuration, persist_config=False)
        found = namespace or _namespace_of(kubeconfig, context)
    except (config.ConfigException, OSError, yaml.YAMLError, LookupError, TypeError) as error:
        if kubeconfig or context or not SERVICE_ACCOUNT_NAMESPACE.exists():
            raise CommandFailed(
                f"no cluster: {one_line(str(error)).rstrip('.')}; set KUBECONFIG or --kubeconfig, see --context"
            ) from None
        config.load_incluster_config(client_configuration=configuration)
        found = namespace or SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    threading.excepthook = _quiet_forwards
    configuration.retries = False  # an answer or a sentence, not silence while it is tried again
    return KubernetesCluster(configuration, found)


def _namespace_of(kubeconfig: str | None, context: str | None) -> str:
    contexts, current = config.list_kube_config_contexts(kubeconfig)
    chosen = next((one for one in contexts if one["name"] == context), None) if context else current
    return str(((chosen or {}).get("context") or {}).get("namespace") or "default")


class KubernetesCluster:
    """A Cluster that is real.

    It asks for paths instead of through the client's typed APIs: importing those of pods and Secrets takes longer than
    anything else here, and what content type a patch has differs from version to version.
    """

    def __init__(self, configuration: Any, namespace: str) -> None:
        self.namespace = namespace
        self._configuration = configuration
        self._rest = dynamic.DynamicClient(client.ApiClient(configuration), discoverer=lambda *_: None)

    def policy(self, name: str) -> Object:
        return self._call("GET", self._policies(name))

    def policies(self, *, everywhere: bool = False) -> list[Object]:
        return self._items(f"/apis/{wire.API_VERSION}/{wire.PLURAL}" if everywhere else self._policies())

    def patch(self, name: str, operations: Sequence[Mapping[str, Any]], *, dry_run: bool = False) -> Object:
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._call("PATCH", self._policies(name), query, [dict(operation) for operation in operations])

    def revisions(self, name: str) -> list[Object]:
        return self._labelled("/apis/apps/v1", "controllerrevisions", name)

    def pods(self, policy: Object) -> list[Object]:
        name = policy["metadata"]["name"]
        deployments = controlled(self._labelled("/apis/apps/v1", "deployments", name), {policy["metadata"]["uid"]})
        sets = controlled(self._labelled("/apis/apps/v1", "replicasets", name), uids(deployments))
        return controlled(self._labelled("/api/v1", "pods", name), uids(sets))

    def admin_token(self, name: str) -> str:
        secret = self._call("GET", f"/api/v1/namespaces/{quote(self.namespace)}/secrets/{quote(name)}-kvsteward")
        try:
            return base64.b64decode(secret["data"][wire.ADMIN_TOKEN_KEY]).decode()
        except (KeyError, TypeError, ValueError):
            raise CommandFailed(f"Secret {name}-kvsteward has no {wire.ADMIN_TOKEN_KEY}: it is not ours") from None

    def ask(self, pod: str, path: str, token: str, seconds: float) -> tuple[int, bytes]:
        url = f"{self._configuration.host}/api/v1/namespaces/{quote(self.namespace)}/pods/{quote(pod)}/portforward"
        try:
            forward = ws_client.portforward_call(
                self._configuration,
                "GET",
                url,
                query_params=[("ports", str(wire.ADMIN_PORT))],
                headers=credentials(self._configuration),
            )
        except client.ApiException as error:
            raise PodSilent(handshake_sentence(str(error.reason))) from None
        connection = http.client.HTTPConnection("localhost")
        try:
            connection.sock = forward.socket(wire.ADMIN_PORT)
            connection.sock.settimeout(seconds)
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            why = forward.error(wire.ADMIN_PORT) or f"{type(error).__name__} {error}".strip()
            raise PodSilent(f"its admin port does not answer: {one_line(why)}") from None
        finally:
            connection.close()
            forward.close()

    def _policies(self, name: str = "") -> str:
        path = f"/apis/{wire.API_VERSION}/namespaces/{quote(self.namespace)}/{wire.PLURAL}"
        return f"{path}/{quote(name)}" if name else path

    def _labelled(self, root: str, plural: str, policy: str) -> list[Object]:
        path = f"{root}/namespaces/{quote(self.namespace)}/{plural}"
        return self._items(path, labelSelector=f"{wire.POLICY_LABEL}={policy}")

    def _items(self, path: str, **query: str) -> list[Object]:
        found: list[Object] = []
        while True:
            page = self._call("GET", path, {"limit": str(PAGE), **query})
            found += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return found
            query["continue"] = token

    def _call(self, method: str, path: str, query: Mapping[str, str] | None = None, patch: Any = None) -> Object:
        with sentences(self._configuration.host):
            response = self._rest.request(
                method,
                path,
                patch,
                query_params=list((query or {}).items()),
                content_type="application/json-patch+json" if patch is not None else "application/json",
                serialize=False,
                _request_timeout=TIMEOUT,
            )
            found: Object = json.loads(response.data)
            return found


def credentials(configuration: Any) -> dict[str, str]:
    """Headers that say who asks; certificates go with the connection."""
    settings = configuration.auth_settings().values()
    return {one["key"].lower(): one["value"] for one in settings if one["in"] == "header" and one["value"]}


def uids(bodies: Sequence[Object]) -> set[str]:
    return {body["metadata"]["uid"] for body in bodies}


def controlled(bodies: Sequence[Object], by: set[str]) -> list[Object]:
    """Those whose controller is among `by`."""
    return [body for body in bodies if any(uid in by for uid in _controllers(body))]


def _controllers(body: Object) -> list[str]:
    owners = body["metadata"].get("ownerReferences") or ()
    return [owner["uid"] for owner in owners if owner.get("controller")]


@contextlib.contextmanager
def sentences(host: str) -> Iterator[None]:
    """Turns what the client raises into a CommandFailed, or a Conflict."""
    try:
        yield
    except client.ApiException as error:
        raise refusal(int(error.status or 0), str(error.reason or ""), error.body) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        reason = one_line(str(getattr(error, "reason", None) or error))
        raise Unreachable(f"the API server {host} does not answer: {reason}") from None
    except ValueError:
        raise CommandFailed(f"{host} does not answer like an API server: check the address in the kubeconfig") from None


def refusal(status: int, reason: str, body: str | bytes | None) -> CommandFailed | Conflict:
    """What an answer of the API server means. `body` is a Status object, or a proxy's page."""
    try:
        told = json.loads(body or "")
    except ValueError:
        told = None
    told = told if isinstance(told, dict) else {}
    message = one_line(str(told.get("message") or reason))
    details = told.get("details") or {}
    match status:
        case 0:
            return Unreachable(f"the API server does not answer: {message}")
        case 401:
            return CommandFailed("the API server does not know you: log in again, or choose another --context")
        case 403:
            return CommandFailed(f"you may not do this: {message}")
        case 404 if details.get("name"):
            kind = details.get("kind", "object")
            return NotFound(f"{kind} {details['name']!r} was not found in this namespace; see -n")
        case 404:
            return NotFound("this cluster has no KVCachePolicies: install the CRD with kubectl apply -f crds/")
        case 409:
            return Conflict(message)
        case 400 | 422:
            return CommandFailed(f"the API server does not take the change: {message}")
    return CommandFailed(f"the API server answers {status}: {message}")


def handshake_sentence(reason: str) -> str:
    """What the websocket client says of a port-forward that was turned down, without its headers."""
    if found := re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', reason):
        with contextlib.suppress(ValueError):
            return f"no port-forward: {one_line(json.loads(chr(34) + found[1] + chr(34)))}"
    return f"no port-forward: {one_line(reason.partition(' -+-+- ')[0])}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def _quiet_forwards(args: threading.ExceptHookArgs) -> None:
    """A broken port-forward also breaks in the client's own thread; whoever waited for it has been told."""
    if not (args.thread and args.thread.name.startswith("Kubernetes port forward proxy")):
        threading.__excepthook__(args)
