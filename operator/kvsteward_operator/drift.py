"""Whether an object in the cluster differs from what is wanted, looking only at what we set.

Fields that the API server fills in, and what others add beside ours, are left alone, as server-side apply does.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from kvsteward_contract import wire

from .api import Object
from .objects.digests import digest

APPLIED_ANNOTATION = f"{wire.GROUP}/applied"

_SCALES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10) ** 3, "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9, "T": Decimal(10) ** 12, "P": Decimal(10) ** 15, "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10, "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30, "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50, "Ei": Decimal(2) ** 60,
}  # fmt: skip


def marked(desired: Object) -> Object:
    """A copy with a digest of itself in an annotation: a field that isn't wanted any more shows by it alone."""
    metadata = dict(desired["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest(desired)[:16]}
    return {**desired, "metadata": metadata}


def mark_of(body: Object) -> str:
    return str((body["metadata"].get("annotations") or {}).get(APPLIED_ANNOTATION, ""))


def holds(desired: Any, live: Any, *, quantity: bool = False) -> bool:
    """Whether `live` has all that `desired` says. Lists of named items are compared by name, others by position.

    `quantity`: strings are Kubernetes quantities, which the API server writes in its own way (1024Mi as 1Gi).
    """
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            name in live and holds(value, live[name], quantity=quantity or name in ("limits", "requests", "sizeLimit"))
            for name, value in desired.items()
        )
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        if not isinstance(live, Sequence) or isinstance(live, str):
            return False
        if desired and all(isinstance(item, Mapping) and "name" in item for item in desired):
            named = {item.get("name"): item for item in live if isinstance(item, Mapping)}
            return all(item["name"] in named and holds(item, named[item["name"]]) for item in desired)
        return len(desired) == len(live) and all(holds(one, other) for one, other in zip(desired, live, strict=True))
    if quantity and desired != live:
        return _amount(desired) is not None and _amount(desired) == _amount(live)
    return bool(desired == live)


def spoilt_lists(desired: Any, live: Any, path: str = "") -> dict[str, Any]:
    """The wanted lists that `live` has otherwise, by JSON pointer. Items that others put beside ours can make ours
    invalid (two ports of one name), and server-side apply never takes them away."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        found: dict[str, Any] = {}
        for name, value in desired.items():
            if name in live:
                found |= spoilt_lists(value, live[name], f"{path}/{name.replace('~', '~0').replace('/', '~1')}")
        return found
    return {path: desired} if isinstance(desired, list) and not holds(desired, live) else {}


def _amount(value: Any) -> Decimal | None:
    text = str(value)
    digits = text.rstrip("numkMGTPEi")
    try:
        return Decimal(digits) * (_SCALES[text[len(digits) :]] if len(digits) < len(text) else 1)
    except (InvalidOperation, KeyError):
        return None
