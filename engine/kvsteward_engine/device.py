"""Which device and number format to compute in, and whether the two go together."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvsteward_engine.errors import UnsupportedDevice

NUMBERS = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises `UnsupportedDevice` for one that isn't there."""
    if name not in ("auto", "cpu", "cuda"):
        raise UnsupportedDevice(f"device {name} is unknown; choose auto, cpu or cuda")
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise UnsupportedDevice("device cuda was asked for, but torch finds no usable GPU; choose cpu or auto")
    return torch.device("cuda" if present and name != "cpu" else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of FP32, BF16 or FP16, tried out on the device. Raises `UnsupportedDevice` if it can't do it."""
    dtype = NUMBERS.get(name)
    if dtype is None:
        raise UnsupportedDevice(f"dtype {name} is not supported by this engine; choose Auto, BF16, FP16 or FP32")
    try:
        if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise RuntimeError("no bfloat16 arithmetic")
        x = torch.ones((1, 2, 4, 16), dtype=dtype, device=device)
        F.rms_norm(F.linear(F.scaled_dot_product_attention(x, x, x), x[0, 0]), (4,), x[0, 0, 0, :4], 1e-6)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedDevice(
            f"the {device.type} device can't compute in {name} ({reason}); choose another"
        ) from None
    return dtype


def set_threads(threads: int) -> None:
    """Use `threads` CPU threads for arithmetic; 0 leaves torch's choice."""
    if threads < 0:
        raise UnsupportedDevice(f"threads is {threads}; it must be 0 (torch's choice) or more")
    if threads:
        torch.set_num_threads(threads)
