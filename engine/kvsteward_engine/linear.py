"""Linear layers with their weights laid out for the device once, at load.

On CPU, oneDNN's own blocked layout saves it from reordering the weight at every call (a third of a decode step in
bfloat16), and it applies activations and residuals while the result is still in registers. Where this build of torch
has no oneDNN for the dtype, weights stay as they are.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """(rows, in) -> (rows, out)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual` (rows, out) plus the layer's result, in the residual's dtype."""

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The layer's result multiplied elementwise by `factor` (rows, out)."""

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result through the activation y * sigmoid(y)."""


class PlainLinear:
    """Keeps the weight (out, in) as torch stores it."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(x)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(factor)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)


_pointwise = torch.ops.mkldnn._linear_pointwise


class PackedLinear:
    """Keeps the weight in oneDNN's blocked layout (an opaque tensor)."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _pointwise(x, self._weight, self._bias, "none", [], "")

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if residual.dtype != x.dtype:
            return residual + self(x)
        return _pointwise.binary(x, residual, self._weight, self._bias, "add")

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return _pointwise.binary(x, factor, self._weight, self._bias, "mul")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return _pointwise(x, self._weight, self._bias, "swish", [], "")


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest layout for the weight's device and dtype."""
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have oneDNN kernels for the dtype."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
