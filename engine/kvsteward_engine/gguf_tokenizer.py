"""Turns the tokenizer inside a GGUF file into the files a Hugging Face folder has.

Byte-level BPE only; the way text is cut before merging is named in the file, and an unknown name is refused, for a
nearly right cut gives nearly right tokens.
"""

from __future__ import annotations

from typing import Any

from kvsteward_engine.errors import BadCheckpoint, UnsupportedModel
from kvsteward_engine.gguf import GgufCheckpoint

CONTROL, USER_DEFINED = 3, 4  # GGUF's token types that are matched whole before anything else

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _MARKS
_QWEN2 = _WORDS + r"\p{N}" + _MARKS


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [cut, _byte_level(use_regex=False)]


_CUTS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}


def tokenizer_json(file: GgufCheckpoint) -> dict[str, Any]:
    """The content of tokenizer.json. Raises `UnsupportedModel` for a kind of tokenizer other than those above."""
    model, cut = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or cut not in _CUTS:
        raise UnsupportedModel(
            f"{file.path} has a {model} tokenizer of kind {cut}; byte-level BPE of {', '.join(_CUTS)} is read"
            " - put a tokenizer.json beside the file's Hugging Face form instead"
        )
    tokens, merges = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise BadCheckpoint(f"{file.path} has no tokens or no merges; the file is incomplete")
    kinds = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(place, token, special=kind == CONTROL)
            for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[cut]},
        "post_processor": _bos_first(file, tokens),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut == "llama-bpe",
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def tokenizer_config(file: GgufCheckpoint) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens by name, and the chat template."""
    tokens = file.field("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.config.max_positions,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        place = file.field(f"tokenizer.ggml.{key}_token_id")
        if place is not None:
            config[f"{name}_token"] = tokens[place]
    template = file.field("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _added(place: int, token: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": place, "content": token, **flags}


def _bos_first(file: GgufCheckpoint, tokens: list[str]) -> dict[str, Any] | None:
    place = file.field("tokenizer.ggml.bos_token_id")
    if not file.field("tokenizer.ggml.add_bos_token", False) or place is None:
        return None
    name = tokens[place]
    first, second = {"SpecialToken": {"id": name, "type_id": 0}}, {"SpecialToken": {"id": name, "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, second, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [place], "tokens": [name]}},
    }
