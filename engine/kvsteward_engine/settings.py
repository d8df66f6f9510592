"""What an engine is told at start: its limits, its identity, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvsteward_contract.identity import Identity

from kvsteward_engine.errors import StartError

MAX_GHOSTS = 1 << 18


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Raises `StartError` where limits contradict each other."""

    pages: int  # in the pool
    block_tokens: int  # tokens a page
    max_tokens: int  # context length served: prompt and output of one request together
    identity: Identity  # of the model and layout, with an empty salt; each scope's salt is put in its place
    max_concurrent: int = 64  # running sequences
    max_waiting: int = 256  # queued requests, all queues together
    prefill_chunk: int = 512  # tokens a step: decodes first, prompt tokens in what is left
    eos_token_ids: frozenset[int] = frozenset()
    regret_window_seconds: float = 300.0  # a page wanted again this soon after its eviction is regretted
    ghosts: int = 0  # evicted pages remembered; 0 = as many as the pool has pages, within 1,024 .. 262,144
    outcomes: int = 4096  # finished requests whose outcome can still be asked for
    model: str = ""  # the rest is what the engine reports of itself
    build: str = ""
    dtype: str = ""
    bytes_per_token: int = 0

    def __post_init__(self) -> None:
        for name in ("pages", "block_tokens", "max_tokens", "max_concurrent", "prefill_chunk", "outcomes"):
            if getattr(self, name) < 1:
                raise StartError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_waiting < 0 or self.ghosts < 0 or self.regret_window_seconds < 0:
            raise StartError("max_waiting, ghosts and regret_window_seconds can't be negative")
        if self.identity.salt:
            raise StartError("the engine's own identity carries no salt: salts come with each request's directive")

    @property
    def ghost_limit(self) -> int:
        """Entries the ghost list may hold."""
        return self.ghosts or min(MAX_GHOSTS, max(1024, self.pages))

    @property
    def quantum(self) -> int:
        """Prompt tokens a queue may take before the next queue's turn: a quarter of a step, in whole pages."""
        return max(1, self.prefill_chunk // 4 // self.block_tokens) * self.block_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.block_tokens)
