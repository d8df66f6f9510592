"""Which technique answers which constraint, what it costs, and where this project has it. Data, and a look-up.

A technique that belongs to a model's training can't be switched on for a checkpoint without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsteward_bench.plan.shape import Heads, Kind, Shape


@dataclass(frozen=True, slots=True)
class Technique:
    """`field`: of a policy, the one that turns it on ('' where the checkpoint decides or nothing has to be done)."""

    name: str
    changes: str  # what it makes smaller
    saves: str
    trade_off: str
    leaves: str  # what it does nothing about
    trained: bool = False  # part of the checkpoint
    field: str = ""


GQA = Technique(
    "GQA, MQA",
    "KV heads a layer",
    "8 KV heads for 64 query heads: an eighth",
    "fewer heads hold less; quality is settled in training",
    "the number of tokens and layers",
    trained=True,
)
CROSS_LAYER = Technique(
    "Cross-layer attention",
    "layers that keep a cache",
    "a sharing factor of 2: half, on top of GQA",
    "the checkpoint must be trained with the same sharing; it is no switch",
    "the number of tokens",
    trained=True,
)
WINDOWS = Technique(
    "Sliding windows",
    "tokens kept in local layers",
    "local layers stop growing at the window",
    "local layers see nothing older; nothing is saved below the window",
    "the global layers, which go on growing",
    trained=True,
)
MLA = Technique(
    "Multi-head latent attention",
    "values a token takes",
    "one latent and a rotary key instead of all heads: 4.7 MiB to 67.5 KiB a token in DeepSeek-V2",
    "projections that only a model trained for it has",
    "the number of tokens",
    trained=True,
)
HYBRID = Technique(
    "Hybrid recurrent layers",
    "layers that grow at all",
    "36 of 48 layers with a state of one size: a quarter of the growth",
    "exact recall over a long context rests on the few attention layers; prefix reuse needs checkpoints of the state",
    "the attention layers, which go on growing",
    trained=True,
)
COMPRESSED = Technique(
    "Compressed sparse attention",
    "entries stored and entries read",
    "one entry for m tokens, of which a step reads the k best",
    "detail inside a group is gone outside the local window; belongs to the model",
    "the local window",
    trained=True,
)
SPARSE_READS = Technique(
    "Query-aware sparse reads",
    "pages a step reads",
    "attention time at long context: a step reads the k best pages",
    "an approximation; page summaries have to be kept and scored",
    "memory: every page stays",
    field="spec.cache.sparseReads",
)
QUANTISED = Technique(
    "Quantised pages",
    "bytes of a value",
    "FP8 a half, INT4 a quarter of BF16",
    "rounding error, and scales beside the values; measure quality for your task",
    "the number of tokens",
    field="spec.cache.dtype",
)
EVICTION = Technique(
    "Token eviction within a sequence",
    "tokens kept of each sequence",
    "a budget of 50 %: half",
    "what was dropped can't be attended to again: test with whole agent traces, delayed references and structured "
    "prompts; a needle test alone says little. Such sequences share no prefix",
    "attention to tokens that turn out to matter later",
    field="spec.cache.tokenBudget",
)
PAGING = Technique(
    "Paging",
    "memory reserved and not used",
    "less than one page a sequence is lost; freed pages serve anybody at once",
    "block tables, and attention that reads through them",
    "bytes of the tokens themselves",
)
PREFIX = Technique(
    "Prefix reuse",
    "prompt work and pages that are the same",
    "a repeated prefix is computed and stored once per scope",
    "only exactly equal tokens from the start count: a time stamp, reordered JSON or other white space ends the match",
    "text that is equal in the middle only, and what is generated",
    field="spec.rollout.stage",
)
OFFLOAD = Technique(
    "Host offload",
    "pages of idle sequences in device memory",
    "device memory for what runs; evicted prefixes come back without being computed",
    "a transfer before they can be used: measure the time to resume and the bandwidth",
    "bytes altogether, which stay the same in both memories",
    field="spec.cache.offload",
)
TECHNIQUES = (
    GQA, CROSS_LAYER, WINDOWS, MLA, HYBRID, COMPRESSED, SPARSE_READS, QUANTISED, EVICTION, PAGING, PREFIX, OFFLOAD,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Situation:
    """`key`: the flag. `first`: what to do before any technique. `techniques` in the order to try them."""

    key: str
    when: str
    first: str
    techniques: tuple[Technique, ...]


SITUATIONS = (
    Situation(
        "choosing-model",
        "a model is still to be chosen",
        "compare KV heads, the share of local layers, latent sizes and recurrent layers with `kvsteward plan`: they "
        "set the cache you start from, and no setting changes them later",
        (GQA, MLA, WINDOWS, HYBRID, CROSS_LAYER, COMPRESSED),
    ),
    Situation(
        "memory-full",
        "the pool is full and the model is given",
        "quantise first, then make prefixes equal: both keep every token; evict tokens only after tests of your own "
        "workload",
        (QUANTISED, PREFIX, OFFLOAD, EVICTION),
    ),
    Situation(
        "memory-unchanged",
        "a technique is on and the memory in use is what it was",
        "look at the pool's tokens and pages, not at the process: a pool of fixed size turns smaller entries into more "
        "tokens",
        (QUANTISED, PAGING),
    ),
    Situation(
        "slow-attention",
        "tokens come slowly at long context",
        "measure cache reads and attention time first: what only saves memory need not make a step faster",
        (SPARSE_READS, QUANTISED, COMPRESSED, WINDOWS),
    ),
    Situation(
        "long-context",
        "one sequence's cache grows too large",
        "see what part grows and what part is fixed with `kvsteward plan`",
        (QUANTISED, EVICTION, WINDOWS, HYBRID, MLA),
    ),
    Situation(
        "duplicate-prompts",
        "many requests start with the same text",
        "keep what is equal at the front, byte for byte: no time stamps, fixed key order in tool schemas, one template",
        (PREFIX,),
    ),
    Situation(
        "slow-first-token",
        "long prompts take long before the first token",
        "look at eligible and reused tokens: what was eligible and not resident was evicted",
        (PREFIX, OFFLOAD),
    ),
    Situation(
        "idle-sessions",
        "sessions that pause hold device memory",
        "moving cold pages can do more than making the active ones smaller; a client's next request continues only "
        "where its prefix is still known",
        (OFFLOAD, PREFIX),
    ),
    Situation(
        "fragmentation",
        "memory is reserved or scattered, and sequences don't fit",
        "nothing to turn on here: the pool is paged; smaller blockTokens lose less of each sequence's last page",
        (PAGING,),
    ),
)


BY_KEY = {one.key: one for one in SITUATIONS}


def has(technique: Technique, shape: Shape) -> bool:
    """Whether a checkpoint was trained with it; True of everything that is switched on at run time."""
    kinds = {layer.kind for layer in shape.layers}
    return {
        GQA.name: shape.heads in (Heads.GQA, Heads.MQA),
        MLA.name: shape.heads is Heads.MLA,
        CROSS_LAYER.name: Kind.SHARED in kinds,
        WINDOWS.name: any(keep.window for layer in shape.layers for keep in layer.keeps),
        HYBRID.name: bool(kinds & {Kind.RECURRENT, Kind.PARALLEL}),
        COMPRESSED.name: Kind.COMPRESSED in kinds,
    }.get(technique.name, True)
