"""From `serve`'s flags to an engine that answers: sizes first, then weights, then a first token."""

import asyncio
import gc
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from kvsteward_contract.identity import Identity

from kvsteward_engine.checkpoint import describe
from kvsteward_engine.config import ModelConfig
from kvsteward_engine.core import EngineThread
from kvsteward_engine.errors import StartError
from kvsteward_engine.sequence import SamplingParams
from kvsteward_engine.service import Loaded
from kvsteward_engine.settings import EngineSettings
from kvsteward_engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to load, as the flags of `serve` say it. `max_tokens` None: as many as model and capacity allow."""

    model: Path
    name: str
    model_revision: str
    tokenizer_revision: str
    dtype: str  # Auto, BF16, FP16 or FP32
    device: str  # auto, cpu or cuda
    threads: int
    deterministic: bool
    capacity: int  # bytes for pages
    block_tokens: int
    max_tokens: int | None
    max_concurrent: int
    max_waiting: int
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a checkpoint and the flags come to."""

    dtype: str
    bytes_per_token: int
    pages: int
    max_tokens: int


def sizes(wanted: Wanted, config: ModelConfig) -> Sizes:
    """Pages that fit the capacity, and the context served. Raises `StartError` where the flags can't be met."""
    dtype = config.dtype if wanted.dtype == "Auto" else wanted.dtype
    per_token = config.bytes_per_token(dtype)
    pages = wanted.capacity // (per_token * wanted.block_tokens)
    tokens = pages * wanted.block_tokens
    if wanted.max_tokens is not None and wanted.max_tokens > config.max_positions:
        raise StartError(f"--max-tokens {wanted.max_tokens} is more than the model's {config.max_positions} positions")
    least = wanted.max_tokens or 2
    if tokens < least:
        raise StartError(
            f"--capacity holds {tokens} tokens of {per_token} bytes, fewer than the {least} of --max-tokens; "
            f"give at least {-(-least // wanted.block_tokens) * wanted.block_tokens * per_token} bytes"
        )
    return Sizes(dtype, per_token, pages, wanted.max_tokens or min(config.max_positions, tokens))


def build_of(torch_version: str, device: str, deterministic: bool) -> str:
    """What computes: part of every page's identity, since other versions may round differently."""
    parts = [
        f"kvsteward {importlib.metadata.version('kvsteward')}",
        f"torch {torch_version}",
        device,
        platform.machine(),
    ]
    return ", ".join([*parts, "deterministic"] if deterministic else parts)


def load(wanted: Wanted, on_failure: Callable[[str], None]) -> Loaded:
    """Reads the weights, starts the engine's thread and waits for its first token; takes seconds to minutes.

    Raises `StartError`. `on_failure` is called, from another thread, when the engine can serve no more.
    """
    began = time.monotonic()
    tokenizer = Tokenizer.load(wanted.model)
    size = sizes(wanted, describe(wanted.model))

    import torch  # takes seconds

    from kvsteward_engine.runner import Runner

    runner = Runner(
        wanted.model,
        dtype=wanted.dtype,
        pages=size.pages,
        block_tokens=wanted.block_tokens,
        deterministic=wanted.deterministic,
        device=wanted.device,
        threads=wanted.threads,
    )
    build = build_of(str(torch.__version__), runner.device.type, wanted.deterministic)
    layout = f"{size.dtype} {wanted.block_tokens} {build}"
    settings = EngineSettings(
        pages=size.pages,
        block_tokens=wanted.block_tokens,
        max_tokens=size.max_tokens,
        identity=Identity(wanted.model_revision, wanted.tokenizer_revision, "", layout, b""),
        max_concurrent=wanted.max_concurrent,
        max_waiting=wanted.max_waiting,
        prefill_chunk=wanted.prefill_chunk,
        eos_token_ids=frozenset(runner.eos_token_ids),
        model=wanted.name,
        build=build,
        dtype=size.dtype,
        bytes_per_token=size.bytes_per_token,
    )
    engine = EngineThread(runner, settings, on_failure)
    engine.start()
    asyncio.run(_first_token(engine))
    gc.collect()
    gc.freeze()  # the model lives as long as the process: no collection need look at it again
    log.info(
        "serving %s: %d pages of %d tokens, context %d, %s on %s, loaded in %.1f s",
        *(wanted.name, size.pages, wanted.block_tokens, size.max_tokens, size.dtype, runner.device.type),
        time.monotonic() - began,
    )
    return Loaded(engine, tokenizer, runner.vocab_size, size.max_tokens)


async def _first_token(engine: EngineThread) -> None:
    """The first step pays for what is set up on first use; no client should. Cold, so nothing stays in the cache."""
    async with aclosing(engine.generate("0" * 32, [0], SamplingParams(max_tokens=1), None)) as deltas:
        async for _ in deltas:
            pass
