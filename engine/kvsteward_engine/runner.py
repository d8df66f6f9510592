"""Runs steps on a model: owns weights and the page pool, turns a `Step` into sampled tokens.

Knows nothing of queues, keys or requests; which pages a sequence holds is decided elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvsteward_engine.attention import Attention, BatchedAttention, KVLayout, PagePool
from kvsteward_engine.batch import plan
from kvsteward_engine.checkpoint import open_checkpoint
from kvsteward_engine.config import ModelConfig
from kvsteward_engine.device import choose_device, choose_dtype, set_threads
from kvsteward_engine.errors import OutOfMemory
from kvsteward_engine.models import Model, forward, load_model
from kvsteward_engine.sampler import sample
from kvsteward_engine.sequence import Sampled, Step


class Runner:
    """`pages` of `block_tokens` tokens each are allocated at once.

    `dtype` is Auto (the checkpoint's own), BF16, FP16 or FP32; `device` auto, cpu or cuda; `threads` 0 leaves torch's
    choice. Raises a `StartError` if the checkpoint or the device can't be used so.
    """

    def __init__(
        self,
        model_dir: Path | str,
        dtype: str = "Auto",
        pages: int = 1024,
        block_tokens: int = 16,
        deterministic: bool = False,
        device: str = "auto",
        threads: int = 0,
    ) -> None:
        set_threads(threads)
        self.device = choose_device(device)
        with open_checkpoint(Path(model_dir)) as opened, torch.inference_mode():
            self.config: ModelConfig = opened.config
            self.dtype = self.config.dtype if dtype == "Auto" else dtype
            number = choose_dtype(self.dtype, self.device)
            layout = KVLayout(self.config.layers, self.config.kv_heads, self.config.head_dim, block_tokens, number)
            positions = min(self.config.max_positions, pages * block_tokens)
            model: Model = load_model(self.config, opened.tensors, number, self.device, positions)
            self.pool = PagePool(layout, pages, self.device)
            attention: Attention = BatchedAttention(self.pool)
            if deterministic:
                from kvsteward_engine.deterministic import deterministic_parts

                model, attention = deterministic_parts(model, self.pool, self.config)
        self._model = model
        self._attention = attention
        self.block_tokens = block_tokens
        self.deterministic = deterministic
        self.vocab_size = self.config.vocab
        self.max_positions = self.config.max_positions
        self.eos_token_ids = self.config.eos_token_ids
        self.bytes_per_token = layout.bytes_per_token

    def run(self, step: Step) -> list[Sampled]:
        """Compute a step; one `Sampled` for each work with `sample`, in their order.

        Raises `OutOfMemory` if the device has no room for the step's intermediate values: no token was sampled, and
        the same positions may be computed again in smaller steps.
        """
        with torch.inference_mode():
            wanted = [work.sequence for work in step.works if work.sample]
            logits = self.logits(step) if step.works else None
            return [] if logits is None or not wanted else sample(logits, wanted)

    def logits(self, step: Step) -> torch.Tensor:
        """Compute a step; float32 logits (works with `sample`, vocab), in their order."""
        with torch.inference_mode():
            try:
                batch = plan(step, self.block_tokens, self.device, self._attention.group_tokens)
                return forward(self._model, self._attention, batch)
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(f"the device ran out of memory in a step of {len(step.works)} works") from error
