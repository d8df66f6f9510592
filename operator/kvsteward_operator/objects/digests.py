"""The three digests of a policy, never mixed.

cohort    what a page means, without the image; names the pinned image
identity  cohort and image: names a generation
template  everything that the pods are made from
spec      the whole accepted spec but the replicas: names ControllerRevisions

A field at its default is left out of all of them, so that a field that a later version adds changes no digest, and
upgrading the CRD or the operator restarts nothing.
"""

import hashlib
from typing import Any

import msgspec
from kvsteward_contract.policy import PolicySpec

_encoder = msgspec.json.Encoder(order="sorted")


def significant(part: msgspec.Struct) -> dict[str, Any]:
    """A struct as JSON values, without the fields that are at their defaults, at every depth."""
    found = {}
    for field in msgspec.structs.fields(part):
        value = getattr(part, field.name)
        if not field.required:
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            if value == default:
                continue
        found[field.encode_name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return significant(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return msgspec.to_builtins(value)


def digest(value: Any) -> str:
    """64 hex digits of JSON values, whatever the order of their keys."""
    return hashlib.sha256(_encoder.encode(value)).hexdigest()


def stored_spec(spec: PolicySpec) -> dict[str, Any]:
    """A spec as a ControllerRevision keeps it: the replicas belong to the resource alone (autoscalers set them)."""
    plain = significant(spec)
    plain["engine"].pop("replicas", None)
    return plain


def spec_digest(spec: PolicySpec) -> str:
    return digest(stored_spec(spec))


def cohort_digest(spec: PolicySpec) -> str:
    model = spec.engine.model
    return digest(
        {
            "backend": spec.engine.backend.value,
            "model": model.name,
            "revision": model.revision,
            "tokenizerRevision": model.tokenizer_revision,
            "source": significant(model.source),
            "blockTokens": spec.cache.block_tokens,
            "dtype": spec.cache.dtype.value,
        }
    )


def identity_digest(spec: PolicySpec, image: str) -> str:
    return digest({"cohort": cohort_digest(spec), "image": image})


def template_digest(spec: PolicySpec, image: str) -> str:
    """Without the sidecar's image: pods get a newer one when something else changes them, or never by themselves."""
    engine = significant(spec.engine)
    engine.pop("replicas", None)
    cache = significant(spec.cache)
    identity = spec.scopes.identity
    return digest(
        {
            "engine": engine | {"image": image},
            "cache": cache,
            "secrets": [identity.secret, identity.gateway_secret],
            "drainSeconds": spec.rollover.drain_seconds,
        }
    )
