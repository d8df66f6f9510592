"""What a checkpoint is: sizes, rotary embedding and flags, read from config.json and checked once.

Knows nothing of torch. A checkpoint this engine can't run exactly is refused here, in one sentence, never run in part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsteward_engine.errors import BadCheckpoint, UnsupportedModel

# The dtypes a checkpoint may declare, and the cache dtype the policy calls Auto for each.
DTYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
DTYPE_BYTES = {"FP32": 4, "BF16": 2, "FP16": 2}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: `theta` is the base; `kind` says how frequencies are changed.

    default: not at all. linear: divided by `factor`. llama3: long wavelengths divided by `factor`, short ones kept,
    a smooth step between (`low`, `high`: wavelengths per original context). factors: divided one by one.
    """

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3 | factors
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. `architecture` is the Hugging Face class name."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int  # divides heads; 1 = MQA, heads = MHA
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rotation (Qwen3)
    dtype: str = "FP32"  # the checkpoint's own
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise BadCheckpoint(f"{self.heads} query heads are not a multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head dimension {self.head_dim} is odd; rotary embedding needs an even one")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values a cached token takes, all layers; `dtype` as in the policy (BF16, FP16, FP32)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint file; raises `BadCheckpoint` if it is missing or not one."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{path} is missing; name a folder with config.json and *.safetensors, or a GGUF file"
        ) from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds no JSON object")
    return value


def load_config(folder: Path) -> ModelConfig:
    """Read config.json, and end-of-sequence ids from generation_config.json where it names some."""
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        ids = read_json(generation).get("eos_token_id")
        if ids is not None:
            raw = {**raw, "eos_token_id": ids}
    return parse_config(raw, where=str(folder / "config.json"))


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Check a Hugging Face config; raises `UnsupportedModel` or `BadCheckpoint` naming the field at fault."""
    architectures = raw.get("architectures") or []
    name = architectures[0] if architectures else f"model type {raw.get('model_type', '(none)')}"
    if name not in _TRAITS:
        raise UnsupportedModel(f"{where} describes {name}; this engine runs {', '.join(sorted(_TRAITS))}")
    _refuse_unsupported(raw, name)
    heads = _integer(raw, "num_attention_heads", where)
    hidden = _integer(raw, "hidden_size", where)
    head_dim = raw.get("head_dim") or hidden // heads
    positions = _integer(raw, "max_position_embeddings", where)
    return ModelConfig(
        architecture=name,
        layers=_integer(raw, "num_hidden_layers", where),
        hidden=hidden,
        intermediate=_integer(raw, "intermediate_size", where),
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=_integer(raw, "vocab_size", where),
        max_positions=positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, name, positions, where),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw, where),
        eos_token_ids=_ids(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
        **_TRAITS[name](raw),
    )


# What each architecture adds to a plain Llama decoder.
_TRAITS = {
    "LlamaForCausalLM": lambda raw: {
        "qkv_bias": bool(raw.get("attention_bias")),
        "output_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
    },
    "MistralForCausalLM": lambda raw: {},
    "Qwen2ForCausalLM": lambda raw: {"qkv_bias": True},
    "Qwen3ForCausalLM": lambda raw: {
        "qkv_bias": bool(raw.get("attention_bias")),
        "output_bias": bool(raw.get("attention_bias")),
        "qk_norm": True,
    },
}


def _refuse_unsupported(raw: Mapping[str, Any], name: str) -> None:
    window = raw.get("sliding_window")
    windowed = window is not None and window < raw.get("max_position_embeddings", 0)
    if name.startswith("Qwen"):
        windowed = windowed and bool(raw.get("use_sliding_window"))
    if windowed or "sliding_attention" in (raw.get("layer_types") or ()):
        raise UnsupportedModel(f"{name} with a sliding window ({window} tokens) is not supported; use a model without")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"weights quantised by {method} are not supported; use the unquantised or a GGUF form")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"activation {activation} is not supported; {name} is run with silu")
    partial = (raw.get("rope_parameters") or raw).get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; whole heads are rotated")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise UnsupportedModel("pretraining_tp above 1 is not supported")


def _rope(raw: Mapping[str, Any], name: str, positions: int, where: str) -> Rope:
    """Both spellings: rope_theta with rope_scaling, and rope_parameters (transformers 5)."""
    settings: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(settings.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    try:
        if kind == "linear":
            return Rope(theta, kind, float(settings["factor"]))
        if kind == "llama3":
            low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
            context = int(settings.get("original_max_position_embeddings") or positions)
            return Rope(theta, kind, float(settings["factor"]), low, high, context)
    except KeyError as missing:
        raise BadCheckpoint(f"{where}: rope scaling {kind} lacks {missing}") from None
    raise UnsupportedModel(f"{name} with rope scaling {kind} is not supported; default, linear and llama3 are")


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"{where} declares dtype {name}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def _integer(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadCheckpoint(f"{where}: {key} is {value!r}; a positive integer is needed")
    return value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
