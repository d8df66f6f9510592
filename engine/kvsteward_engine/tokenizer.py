"""Text to token ids and back, for a checkpoint's tokenizer.json. The one place that knows the `tokenizers` package.

Decoding is by each token's own bytes, so that a stream needs no second look at earlier tokens; that is exact for the
decoders of Llama-family models (byte-level BPE, SentencePiece with byte fallback), and others are refused.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvsteward_engine.chat_template import ChatTemplate, chat_template_of
from kvsteward_engine.checkpoint import find_gguf
from kvsteward_engine.detokenizer import TextStream
from kvsteward_engine.errors import BadCheckpoint, InvalidRequest, UnsupportedModel

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-F]{2})>$")


class Tokenizer:
    """A checkpoint's tokenizer and chat template; safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None = None) -> None:
        # A tokenizer.json may carry the truncation and padding of somebody's training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.template = template
        described = json.loads(backend.to_str())
        self._sentencepiece = _is_sentencepiece(described.get("decoder"))
        added = {entry["id"]: entry["content"] for entry in described.get("added_tokens") or ()}
        special = {entry["id"] for entry in described.get("added_tokens") or () if entry["special"]}
        names = {**{i: name for name, i in backend.get_vocab(with_added_tokens=True).items()}, **added}
        to_bytes = _sentencepiece_bytes if self._sentencepiece else _byte_level_bytes
        whole = [to_bytes(names[i]) if i in names else b"" for i in range(max(names, default=-1) + 1)]
        self.names_bytes: Sequence[bytes] = whole  # token id -> bytes, special tokens by their names
        self._text: Sequence[bytes] = [b"" if i in special else piece for i, piece in enumerate(whole)]

    @classmethod
    def load(cls, checkpoint: Path) -> "Tokenizer":
        """Of a folder with tokenizer.json and, for chat, tokenizer_config.json or chat_template.jinja; or of a GGUF
        file, which holds both. Raises `BadCheckpoint` or `UnsupportedModel`."""
        gguf = find_gguf(checkpoint)
        return cls._from_folder(checkpoint) if gguf is None else cls._from_gguf(gguf)

    @classmethod
    def _from_gguf(cls, file: Path) -> "Tokenizer":
        from kvsteward_engine.gguf import GgufCheckpoint  # slow to import and seldom needed
        from kvsteward_engine.gguf_tokenizer import tokenizer_config, tokenizer_json

        opened = GgufCheckpoint(file)
        backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(opened)))
        return cls(backend, chat_template_of(tokenizer_config(opened)))

    @classmethod
    def _from_folder(cls, directory: Path) -> "Tokenizer":
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise BadCheckpoint(f"{directory} has no tokenizer.json; give a folder with a Hugging Face tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise BadCheckpoint(f"{file} is not a tokenizer this engine can read: {error}") from error
        source = directory / "chat_template.jinja"
        config = _read_config(directory)
        if source.is_file():
            config["chat_template"] = source.read_text("utf-8")
        return cls(backend, chat_template_of(config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `InvalidRequest` for text that is no Unicode (a lone surrogate)."""
        try:
            # Not `encode`, which keeps Python's lock: a long text, whatever thread tokenises it, would hold up the
            # event loop, the engine's steps and the kill switch for as long as it takes.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded.ids)
        except (UnicodeEncodeError, TypeError) as error:  # which of the two depends on the package's version
            raise InvalidRequest("the text holds a lone surrogate, which is no character") from error

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat template applied; its text already holds the special tokens. Raises `InvalidRequest`."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        return self.template.render(messages, add_generation_prompt)

    def stream(self, stops: Iterable[str] = (), chat: bool = False) -> TextStream:
        """A detokeniser for one answer. A chat answer starts a text, a completion continues one."""
        return TextStream(self._text, stops, strip_first_space=chat and self._sentencepiece)

    def has_text(self, token_id: int) -> bool:
        """False for special tokens, and for ids beyond the vocabulary."""
        return token_id < len(self._text) and bool(self._text[token_id])

    def decode(self, token_ids: Iterable[int], chat: bool = False) -> str:
        """Text of a whole answer, without special tokens."""
        stream = self.stream(chat=chat)
        return stream.push(token_ids) + stream.finish()


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise BadCheckpoint(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{file} is not a JSON object")
    return config


def _is_sentencepiece(decoder: Mapping[str, Any] | None) -> bool:
    """True for SentencePiece decoders, False for byte-level ones. Raises `UnsupportedModel` for any other."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return False
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return True
    raise UnsupportedModel(
        f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is neither byte-level nor SentencePiece"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(name: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in name])
    except KeyError:  # an added token, written as itself
        return name.encode()


def _sentencepiece_bytes(name: str) -> bytes:
    byte = _BYTE_TOKEN.match(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()
