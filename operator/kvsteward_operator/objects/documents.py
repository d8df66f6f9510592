"""The ConfigMap of one generation: its policy document, which the sidecars watch."""

from typing import Any

from kvsteward_contract import wire
from kvsteward_contract.document import PolicyDocument, UnknownDocument, canonical, decode_document, version_of

from .naming import Owner


def config_map(owner: Owner, document: PolicyDocument) -> dict[str, Any]:
    data = canonical(document)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(document.generation, {wire.GENERATION_LABEL: document.generation}),
        "data": {wire.DOCUMENT_KEY: data.decode(), wire.VERSION_KEY: version_of(data)},
    }


def read_config_map(body: dict[str, Any] | None) -> tuple[PolicyDocument | None, str]:
    """The document in a ConfigMap and its true version; None and "" when there is none that can be read."""
    text = ((body or {}).get("data") or {}).get(wire.DOCUMENT_KEY)
    if not isinstance(text, str):
        return None, ""
    try:
        return decode_document(text), version_of(text.encode())
    except UnknownDocument:
        return None, ""
