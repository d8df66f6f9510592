"""Kubernetes quantities (https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/)."""

import re
from decimal import Decimal

_SCALES = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,6})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_QUANTITY = re.compile(PATTERN)


def parse_quantity(text: str) -> int:
    """Bytes that a quantity such as `8Gi` stands for, rounded down. Raises ValueError naming the text."""
    if not _QUANTITY.fullmatch(text):
        raise ValueError(f"{text!r} is not a size such as 512Mi or 8Gi")
    digits = text.rstrip("kKMGTPi")
    return int(Decimal(digits) * _SCALES[text[len(digits) :]])
