"""The pod template of one generation: the engine, and beside it the sidecar as a native sidecar container.

Passes Pod Security `restricted`. No token is mounted but the sidecar's, which may read two objects.
"""

from typing import Any

from kvsteward_contract import wire
from kvsteward_contract.policy import IdentitySource, PolicySpec

from .naming import CONTAINER_ENGINE, CONTAINER_SIDECAR, Owner

USER = 65532
RUN = "/run/kvsteward"  # shared, in memory: the engine's token and the latch
CONFIG = "/etc/kvsteward"
MODELS = "/models"
SCRATCH = "/tmp"  # noqa: S108 - a volume of the pod's own
CLOSING_SECONDS = 5  # of the drain: endpoints take a while to forget a pod, so arrivals are still served
GRACE_SECONDS = 15  # beyond the drain, for streams to be flushed and processes to end
STARTUP_SECONDS = 900  # loading a checkpoint

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
SIDECAR_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}


def pod_template(
    owner: Owner, spec: PolicySpec, *, generation: str, template_digest: str, engine_image: str, sidecar_image: str
) -> dict[str, Any]:
    """The template as it is applied, and kept in the policy's ControllerRevision."""
    extra = spec.engine.template
    labels = dict(extra.labels) | owner.labels | {wire.GENERATION_LABEL: generation}
    annotations = dict(extra.annotations) | {
        f"{wire.GROUP}/template": template_digest[:16],
        "kubectl.kubernetes.io/default-container": CONTAINER_ENGINE,
    }
    pod: dict[str, Any] = {
        "serviceAccountName": owner.access_name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.rollover.drain_seconds + GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_sidecar(owner, spec, generation, sidecar_image)],
        "containers": [_engine(spec, engine_image)],
        "volumes": _volumes(owner, spec),
    }
    if extra.node_selector:
        pod["nodeSelector"] = dict(extra.node_selector)
    if extra.tolerations:
        pod["tolerations"] = [
            {
                name: value
                for name, value in (
                    ("key", toleration.key),
                    ("operator", toleration.operator),
                    ("value", toleration.value),
                    ("effect", toleration.effect),
                    ("tolerationSeconds", toleration.toleration_seconds),
                )
                if value not in ("", None)
            }
            for toleration in extra.tolerations
        ]
    if extra.runtime_class_name:
        pod["runtimeClassName"] = extra.runtime_class_name
    if extra.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in extra.image_pull_secrets]
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod}


def _probe(path: str, period: int, failures: int, timeout: int = 2) -> dict[str, Any]:
    """All probes go to the sidecar's admin port: the engine listens on loopback only."""
    return {
        "httpGet": {"path": path, "port": wire.ADMIN_PORT, "scheme": "HTTP"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


def _engine(spec: PolicySpec, image: str) -> dict[str, Any]:
    model, cache, drain = spec.engine.model, spec.cache, spec.rollover.drain_seconds
    container: dict[str, Any] = {
        "name": CONTAINER_ENGINE,
        "image": image,
        "command": ["kvsteward-engine", "serve"],
        "args": [
            f"--model={MODELS}/{model.source.persistent_volume_claim.path}",
            f"--served-model-name={model.name}",
            f"--model-revision={model.revision}",
            f"--tokenizer-revision={model.tokenizer_revision}",
            "--host=127.0.0.1",
            f"--port={wire.ENGINE_PORT}",
            f"--token-file={RUN}/{wire.ENGINE_TOKEN_FILE}",
            f"--capacity={cache.capacity}",
            f"--block-tokens={cache.block_tokens}",
            f"--dtype={cache.dtype.value}",
            f"--max-tokens={model.max_tokens}",
            f"--max-concurrent={spec.engine.max_concurrent}",
            f"--drain-seconds={drain}",
        ],
        "env": [{"name": "HOME", "value": SCRATCH}],
        "securityContext": RESTRICTED,
        "startupProbe": _probe("/engine/startup", 2, STARTUP_SECONDS // 2),
        # 6 x 10 s: a restarting sidecar, which is what answers, is no reason to restart the engine.
        "livenessProbe": _probe("/engine/live", 10, 6, timeout=5),
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": [
                        "kvsteward-engine",
                        "drain",
                        f"--url=http://127.0.0.1:{wire.DRAIN_PORT}",
                        f"--seconds={drain}",
                    ]
                }
            }
        },
        "volumeMounts": [
            {"name": "run", "mountPath": RUN, "readOnly": True},
            {"name": "models", "mountPath": MODELS, "readOnly": True},
            {"name": "tmp", "mountPath": SCRATCH},
        ],
    }
    resources = spec.engine.resources
    if resources.limits or resources.requests:
        container["resources"] = {
            name: {resource: str(amount) for resource, amount in amounts.items()}
            for name, amounts in (("limits", resources.limits), ("requests", resources.requests))
            if amounts
        }
    return container


def _sidecar(owner: Owner, spec: PolicySpec, generation: str, image: str) -> dict[str, Any]:
    identity = spec.scopes.identity
    args = [
        f"--engine=http://127.0.0.1:{wire.ENGINE_PORT}",
        f"--engine-token-file={RUN}/{wire.ENGINE_TOKEN_FILE}",
        "--make-engine-token",
        f"--salt-file={CONFIG}/secret/{wire.SALT_KEY}",
        f"--admin-token-file={CONFIG}/secret/{wire.ADMIN_TOKEN_KEY}",
        f"--state-dir={RUN}",
        "--kubernetes",
        f"--namespace={owner.namespace}",
        f"--policy={owner.name}",
        f"--document={generation}",
        f"--drain-seconds={spec.rollover.drain_seconds}",
        f"--closing-seconds={min(CLOSING_SECONDS, spec.rollover.drain_seconds)}",
        f"--port={wire.TRAFFIC_PORT}",
        f"--admin-port={wire.ADMIN_PORT}",
        f"--drain-port={wire.DRAIN_PORT}",
    ]
    mounts = [
        {"name": "run", "mountPath": RUN},
        {"name": "secret", "mountPath": f"{CONFIG}/secret", "readOnly": True},
        {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True},
    ]
    if identity.source is IdentitySource.API_KEY:
        args.append(f"--tenant-keys={CONFIG}/tenants")
        mounts.append({"name": "tenants", "mountPath": f"{CONFIG}/tenants", "readOnly": True})
    if identity.source is IdentitySource.HEADER:
        args.append(f"--gateway-secret-file={CONFIG}/gateway/{wire.GATEWAY_SECRET_KEY}")
        mounts.append({"name": "gateway", "mountPath": f"{CONFIG}/gateway", "readOnly": True})
    return {
        "name": CONTAINER_SIDECAR,
        "image": image,
        "restartPolicy": "Always",
        "command": ["kvsteward-sidecar", "serve"],
        "args": args,
        "securityContext": RESTRICTED,
        "resources": SIDECAR_RESOURCES,
        "ports": [
            {"name": "http", "containerPort": wire.TRAFFIC_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": wire.ADMIN_PORT, "protocol": "TCP"},
        ],
        # The engine starts once this passes: by then its token is there.
        "startupProbe": _probe("/healthz", 1, 60),
        "livenessProbe": _probe("/healthz", 10, 3),
        "readinessProbe": _probe("/readyz", 1, 2),
        "volumeMounts": mounts,
    }


def _volumes(owner: Owner, spec: PolicySpec) -> list[dict[str, Any]]:
    identity = spec.scopes.identity
    claim = spec.engine.model.source.persistent_volume_claim
    volumes: list[dict[str, Any]] = [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "models", "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}},
        {"name": "secret", "secret": {"secretName": owner.access_name, "defaultMode": 0o440}},
        {
            "name": "token",
            "projected": {
                "defaultMode": 0o440,
                "sources": [
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                    {
                        "downwardAPI": {
                            "items": [
                                {
                                    "path": "namespace",
                                    "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"},
                                }
                            ]
                        }
                    },
                ],
            },
        },
    ]
    # Optional: a missing one is the sidecar's to report, while the pod serves without the cache.
    if identity.source is IdentitySource.API_KEY:
        volumes.append(_optional_secret("tenants", identity.secret))
    if identity.source is IdentitySource.HEADER:
        volumes.append(_optional_secret("gateway", identity.gateway_secret))
    return volumes


def _optional_secret(volume: str, secret: str) -> dict[str, Any]:
    return {"name": volume, "secret": {"secretName": secret, "optional": True, "defaultMode": 0o440}}
