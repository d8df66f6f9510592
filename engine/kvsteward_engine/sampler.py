"""Chooses tokens from logits, vectorised over the batch.

A seeded choice depends on the seed, the token's position and the logits, and on nothing else: a request gives the
same tokens alone or in a batch, after a preemption, and with reused or recomputed pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Ordered

import torch

from kvsteward_engine.sequence import NO_TOKEN, Sampled, SamplingParams, Sequence

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would only lose precision
RANKED = 1024  # likeliest tokens looked at before a full sort is paid for


def sample(logits: torch.Tensor, sequences: Ordered[Sequence]) -> list[Sampled]:
    """One token for each row of `logits` (rows, vocab), float32, the next one of the sequence at its place.

    Log probabilities are those of the model itself, before penalties, temperature and cuts. A row without finite
    logits, which an overflow in 16 bits leaves, gives NO_TOKEN: it is nobody's fault but its own sequence's.
    """
    params = [sequence.sampling for sequence in sequences]
    shaped = _penalised(logits, sequences)
    best, tokens = shaped.max(dim=-1)
    chosen, finite = tokens.tolist(), torch.isfinite(best).tolist()
    drawn = [row for row, each in enumerate(params) if each.temperature >= GREEDY_BELOW and finite[row]]
    if drawn:
        for row, token in zip(drawn, _draw(shaped[drawn], [sequences[row] for row in drawn]), strict=True):
            chosen[row] = token
    if all(each.logprobs is None for each in params):
        results = [Sampled(token) for token in chosen]
    else:
        results = _with_logprobs(logits, chosen, params)
    return results if all(finite) else [one if finite[row] else Sampled(NO_TOKEN) for row, one in enumerate(results)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same seed and position on every machine."""
    digest = hashlib.blake2b(b"%d/%d" % (seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


def _penalised(logits: torch.Tensor, sequences: Ordered[Sequence]) -> torch.Tensor:
    """Lower the tokens each sequence has produced already; a copy where any is penalised."""
    rows = [
        row
        for row, sequence in enumerate(sequences)
        if (sequence.sampling.frequency_penalty or sequence.sampling.presence_penalty) and sequence.output_len
    ]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        sampling = sequences[row].sampling
        produced, counts = torch.tensor(sequences[row].output, device=logits.device).unique(return_counts=True)
        logits[row, produced] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return logits


def _draw(logits: torch.Tensor, sequences: Ordered[Sequence]) -> list[int]:
    """Tokens by inverse transform: the first whose cumulative probability exceeds the row's random number."""
    params = [sequence.sampling for sequence in sequences]
    device = logits.device
    temperatures = torch.tensor([each.temperature for each in params], device=device)
    probabilities = torch.softmax((logits / temperatures[:, None]).double(), dim=-1)
    uniforms = [uniform(sequence.random_key, len(sequence.tokens)) for sequence in sequences]
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=device)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=device)
    cut = [row for row, each in enumerate(params) if each.top_k or each.top_p < 1.0 or each.min_p]
    free = sorted(set(range(len(params))).difference(cut))
    if free:
        tokens[free] = _invert(probabilities[free], numbers[free])
    if cut:
        tokens[cut] = _draw_cut(probabilities[cut], numbers[cut], [params[row] for row in cut])
    return list(tokens.tolist())


def _draw_cut(probabilities: torch.Tensor, numbers: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Draw among each row's likeliest tokens, by probability: top_k first, then top_p of what is left, then min_p."""
    vocab = probabilities.shape[-1]
    ranked = min(RANKED, vocab)
    ranks, order = probabilities.topk(ranked, dim=-1)
    kept = _kept(ranks, params, vocab)
    if ranked < vocab and bool(kept[:, -1].any()):  # some row may want tokens beyond those ranked
        ranks, order = probabilities.sort(dim=-1, descending=True, stable=True)
        kept = _kept(ranks, params, vocab)
    picks = _invert(ranks * kept, numbers)
    return order.gather(-1, picks[:, None]).squeeze(-1)


def _kept(ranks: torch.Tensor, params: list[SamplingParams], vocab: int) -> torch.Tensor:
    """Which of the descending probabilities `ranks` (rows, ranked) survive the cuts; the first always does."""
    device = ranks.device
    limits = torch.tensor([each.top_k or vocab for each in params], device=device)[:, None]
    masses = torch.tensor([each.top_p for each in params], dtype=ranks.dtype, device=device)[:, None]
    floors = torch.tensor([each.min_p for each in params], dtype=ranks.dtype, device=device)[:, None]
    places = torch.arange(ranks.shape[-1], device=device)
    kept = places < limits
    # With top_k the mass is that of the k likeliest; without it, that of the whole vocabulary, which is 1.
    among = ranks * kept
    whole = torch.where(limits < vocab, among.sum(-1, keepdim=True), torch.ones_like(masses))
    before = among.cumsum(-1) - among
    kept &= (before < masses * whole) | (masses >= 1.0)
    kept &= ranks >= floors * ranks[:, :1]
    kept[:, 0] = True
    return kept


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """(rows, n) weights and (rows,) numbers in [0, 1) -> (rows,) places, none of which has weight 0."""
    cumulative = weights.cumsum(-1)
    thresholds = numbers * cumulative[:, -1]
    places = torch.searchsorted(cumulative, thresholds[:, None], right=True).squeeze(-1)
    # Rounding may put a threshold at the very end: fall back to the last place that has weight.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(places, last)


def _with_logprobs(logits: torch.Tensor, chosen: list[int], params: list[SamplingParams]) -> list[Sampled]:
    rows = [row for row, each in enumerate(params) if each.logprobs is not None]
    logs = torch.log_softmax(logits[rows], dim=-1)
    picked = logs.gather(-1, torch.tensor([chosen[row] for row in rows], device=logits.device)[:, None]).squeeze(-1)
    most = max(each.logprobs or 0 for each in params)
    values, tokens = logs.topk(min(most, logs.shape[-1]), dim=-1)
    result = [Sampled(token) for token in chosen]
    for row, logprob, alternatives, ids in zip(rows, picked.tolist(), values.tolist(), tokens.tolist(), strict=True):
        wanted = params[row].logprobs or 0
        result[row] = Sampled(chosen[row], logprob, list(zip(ids[:wanted], alternatives[:wanted], strict=True)))
    return result
