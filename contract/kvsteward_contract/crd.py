"""The CustomResourceDefinition, generated from the types in policy.py and status.py.

`python -m kvsteward_contract.crd` prints the YAML that is kept in crds/.
"""

from typing import Any

import msgspec
import yaml
from msgspec import inspect

from . import wire
from .policy import PolicySpec
from .status import PolicyStatus

Schema = dict[str, Any]

# Rules between fields, keyed by the schema path they are attached to: what policy.broken_rules says, for the API
# server. (rule, message)
RULES: dict[str, list[tuple[str, str]]] = {
    "": [
        (
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 50",
            "metadata.name names a Service: at most 50 lower-case letters, digits and -, the first of them a letter",
        ),
    ],
    "spec": [
        (
            "self.rollout.canary.workloads.all(w, self.workloads.exists(x, x.name == w))",
            "rollout.canary.workloads may only name entries of workloads",
        ),
    ],
    "spec.engine.model.name": [("self == oldSelf", "model.name cannot be changed: create another policy")],
    "spec.scopes.identity": [
        (
            "self.source != 'APIKey' || size(self.secret) > 0",
            "source APIKey needs secret, the Secret with the tenants' keys",
        ),
        (
            "self.source != 'Header' || size(self.gatewaySecret) > 0",
            "source Header needs gatewaySecret, the Secret that proves the gateway",
        ),
    ],
    "spec.rollout": [
        (
            "self.canary.percent + self.protectedPercent <= 100",
            "canary.percent and protectedPercent may together be at most 100",
        ),
    ],
}
# Lists whose items are told apart by a key: merged by it on apply, and unique.
MAP_LISTS = {
    "spec.workloads": "name",
    "spec.scopes.overrides": "tenant",
    "status.conditions": "type",
    "status.generations": "name",
}

COLUMNS = (
    ("Stage", "string", ".status.stage", "Rollout stage in force."),
    ("Canary", "integer", ".status.canaryPercent", "Percent of sessions in the canary."),
    ("Cold TTFT p95", "integer", ".status.evidence.coldTtftP95Milliseconds", "Protected group, milliseconds."),
    ("Reused %", "integer", ".status.evidence.reusedPercent", "Reused of eligible prompt tokens."),
    ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", "All that was asked for is in force."),
    ("Age", "date", ".metadata.creationTimestamp", ""),
)


def schema_of(kind: inspect.Type, path: str, default: Any = msgspec.NODEFAULT) -> Schema:
    """The structural schema of one type; `path` is where it stands in the resource."""
    schema = _described(kind, path)
    if rules := RULES.get(path):
        schema["x-kubernetes-validations"] = [{"rule": rule, "message": message} for rule, message in rules]
    if default is not msgspec.NODEFAULT and default is not None and path.startswith("spec"):
        schema["default"] = default
    return schema


def _described(kind: inspect.Type, path: str) -> Schema:
    if isinstance(kind, inspect.Metadata):
        schema = _described(kind.type, path)
        schema.update(kind.extra_json_schema or {})
        return schema
    if isinstance(kind, inspect.UnionType):
        return _union(kind, path)
    if isinstance(kind, inspect.StructType):
        return _struct(kind, path)
    if isinstance(kind, inspect.EnumType):
        return {"type": "string", "enum": [member.value for member in kind.cls]}
    if isinstance(kind, inspect.StrType):
        return _bounded({"type": "string"}, pattern=kind.pattern, maxLength=kind.max_length, minLength=kind.min_length)
    if isinstance(kind, inspect.IntType):
        return _bounded({"type": "integer", "format": "int64"}, minimum=kind.ge, maximum=kind.le)
    if isinstance(kind, inspect.DictType):
        schema = {"type": "object", "additionalProperties": schema_of(kind.value_type, f"{path}.*")}
        return _bounded(schema, maxProperties=kind.max_length)
    if isinstance(kind, inspect.VarTupleType):
        schema = {"type": "array", "items": schema_of(kind.item_type, f"{path}[]")}
        if key := MAP_LISTS.get(path):
            schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
        return _bounded(schema, maxItems=kind.max_length)
    raise TypeError(f"{path}: no schema for {kind}")


def _union(kind: inspect.UnionType, path: str) -> Schema:
    """Optional values are plain properties that may be absent; int | str is Kubernetes' own either-or."""
    kinds = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
    if len(kinds) == 1:
        return _described(kinds[0], path)
    if {type(each) for each in kinds} == {inspect.IntType, inspect.StrType}:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    raise TypeError(f"{path}: no schema for {kind}")


def _struct(kind: inspect.StructType, path: str) -> Schema:
    properties = {
        field.encode_name: schema_of(field.type, f"{path}.{field.encode_name}", _default(field))
        for field in kind.fields
    }
    schema: Schema = {"type": "object", "properties": properties}
    if required := [field.encode_name for field in kind.fields if field.required]:
        schema["required"] = required
    return schema


def _default(field: inspect.Field) -> Any:
    """A field's default as JSON. An object's is written out: the API server checks CEL rules against it as it is."""
    value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    return value if value is msgspec.NODEFAULT else msgspec.to_builtins(value)


def _bounded(schema: Schema, **bounds: Any) -> Schema:
    return schema | {name: bound for name, bound in bounds.items() if bound is not None}


def crd() -> Schema:
    """The whole CustomResourceDefinition."""
    root: Schema = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": schema_of(inspect.type_info(PolicySpec), "spec"),
            "status": schema_of(inspect.type_info(PolicyStatus), "status"),
        },
        "x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in RULES[""]],
    }
    version = {
        "name": wire.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.engine.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} | ({"description": text} if text else {})
            for name, kind, path, text in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{wire.PLURAL}.{wire.GROUP}"},
        "spec": {
            "group": wire.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": wire.KIND,
                "listKind": f"{wire.KIND}List",
                "plural": wire.PLURAL,
                "singular": wire.KIND.lower(),
                "shortNames": [wire.SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def crd_yaml() -> str:
    return "# Generated from contract/ by `make crd`; edit the types there.\n" + yaml.safe_dump(
        crd(), sort_keys=False, width=120, allow_unicode=True
    )


if __name__ == "__main__":
    print(crd_yaml(), end="")
