"""What a sequence's cache costs and how much a pool holds: a Shape and a Wish in, a Plan out. All bytes are payload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvsteward_bench.plan.errors import CannotPlan
from kvsteward_bench.plan.held import Cost, Held
from kvsteward_bench.plan.shape import Heads, Keep, Kind, Layer, Shape, State
from kvsteward_bench.plan.sizes import QUANTISED, VALUE_BYTES, readable


@dataclass(frozen=True, slots=True)
class Wish:
    """What to plan for. Raises CannotPlan where it contradicts itself."""

    tokens: int  # of one sequence
    dtype: str = "Auto"  # of the pages; Auto: the checkpoint's own
    pool: int | None = None  # bytes for pages
    block_tokens: int = 1  # tokens a page; 1: no rounding to pages
    budget_percent: int = 100  # of the tokens, that eviction within a sequence keeps
    sparse_pages: int = 0  # pages that a step reads of each layer; 0: all
    shared_prefix: int = 0  # leading tokens that all sequences have in common
    offload: int = 0  # bytes of host memory

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.block_tokens < 1:
            raise CannotPlan("a sequence and a page have at least one token")
        if self.dtype != "Auto" and self.dtype not in VALUE_BYTES:
            raise CannotPlan(f"dtype {self.dtype} is none of Auto, {', '.join(VALUE_BYTES)}")
        if not 1 <= self.budget_percent <= 100:
            raise CannotPlan(f"a token budget of {self.budget_percent} % is not within 1 to 100")
        if min(self.sparse_pages, self.offload, self.shared_prefix) < 0 or (self.pool is not None and self.pool < 0):
            raise CannotPlan("sizes and counts can't be negative")
        if self.shared_prefix >= self.tokens:
            raise CannotPlan(
                f"a shared prefix of {self.shared_prefix} tokens leaves nothing of {self.tokens} tokens to compute"
            )
        if self.shared_prefix and self.budget_percent < 100:
            raise CannotPlan("sequences with a token budget share no prefix: drop one of the two")


@dataclass(frozen=True, slots=True)
class Step:
    """The costs once this technique is in force too."""

    technique: str
    detail: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Plan:
    """`capped`: no layer's cache grows past its window. What depends on the pool is None without one."""

    shape: Shape
    wish: Wish
    dtype: str
    cost: Cost
    capped: bool
    steps: tuple[Step, ...]
    pool_tokens: int | None
    sequences: int | None
    offload_tokens: int | None
    notes: tuple[str, ...]


def plan(shape: Shape, wish: Wish) -> Plan:
    """Raises CannotPlan."""
    dtype = shape.dtype if wish.dtype == "Auto" else wish.dtype
    steps, held = _steps(shape, wish, dtype)
    block = wish.block_tokens
    return Plan(
        shape,
        wish,
        dtype,
        steps[-1].cost,
        held.capped,
        steps,
        None if wish.pool is None else _pool_tokens(held, wish.pool - held.fixed(wish.tokens, block), block),
        None if wish.pool is None else _sequences(held, wish),
        _pool_tokens(held, wish.offload, block) if wish.offload else None,
        tuple(_notes(shape, wish, dtype, held)),
    )


def _pool_tokens(held: Held, room: int, block: int) -> int:
    """Tokens in whole pages that fit into `room` bytes."""
    page = held.per_token() * block
    return int(max(room, 0) // page) * block if page else 0


def _sequences(held: Held, wish: Wish) -> int:
    """Sequences of `wish.tokens` that are resident at once; a shared prefix is held once, in whole pages."""
    pool, block = wish.pool or 0, wish.block_tokens
    one = held.total(wish.tokens, block)
    shared = held.grown(wish.shared_prefix // block * block, block) if wish.shared_prefix >= block else 0
    return 1 + (pool - one) // (one - shared) if pool >= one else 0


def _steps(shape: Shape, wish: Wish, dtype: str) -> tuple[tuple[Step, ...], Held]:
    """From plain attention to what is really in force; a step that changes nothing is left out."""
    own = VALUE_BYTES[shape.dtype]
    kinds: set[Kind] = set()

    def held(layers: Iterable[tuple[tuple[Keep, ...], tuple[State, ...]]]) -> Held:
        pairs = tuple(layers)
        keeps = tuple(keep for layer, _ in pairs for keep in layer)
        return Held(keeps, tuple(one for _, states in pairs for one in states), own, shape.dtype)

    def model() -> Held:
        """With what the kinds seen so far bring, and plain attention in all other layers."""
        return held(
            (layer.keeps, layer.states) if layer.kind in kinds else ((Keep(layer.full),), ()) for layer in shape.layers
        )

    now = held(((Keep(layer.alone),), ()) for layer in shape.layers)
    count, queries = len(shape.layers), shape.query_heads
    steps = [
        Step(
            "FullAttention",
            f"{count} layers, each of {queries} query heads with keys and values of its own, {shape.dtype}",
            now.cost(wish.tokens),
        )
    ]

    def then(technique: str, detail: str, after: Held) -> Held:
        if (cost := after.cost(wish.tokens)) != steps[-1].cost:
            steps.append(Step(technique, detail, cost))
        return after

    kinds.add(Kind.FULL)
    now = then(shape.heads.value, _heads_detail(shape), model())
    for technique, wanted, words in _KINDS:
        if layers := tuple(layer for kind in wanted for layer in shape.of(kind)):
            kinds.update(wanted)
            now = then(technique, words(layers, count, shape.dtype), model())
    if dtype != shape.dtype:
        now = replace(now, value_bytes=VALUE_BYTES[dtype])
        bits, before = (int(VALUE_BYTES[one] * 8) for one in (dtype, shape.dtype))
        now = then("Dtype", f"{dtype} pages: {bits} bits a value where {shape.dtype} has {before}", now)
    if wish.budget_percent < 100:
        now = replace(now, budget=wish.budget_percent)
        now = then("TokenBudget", f"{wish.budget_percent} % of the tokens are kept, the others forgotten", now)
    if wish.sparse_pages:
        now = replace(now, pages=wish.sparse_pages, block=wish.block_tokens)
        detail = f"a step reads {wish.sparse_pages} pages a layer; all pages stay in memory"
        now = then("SparseReads", detail, now)
    return tuple(steps), now


def _heads_detail(shape: Shape) -> str:
    if shape.heads is Heads.MLA:
        return f"one latent and rotary key of {shape.layers[0].full} values for {shape.query_heads} heads"
    heads = "1 KV head" if shape.kv_heads == 1 else f"{shape.kv_heads} KV heads"
    return f"{heads} for {shape.query_heads} query heads"


def _state_detail(layers: tuple[Layer, ...], count: int, dtype: str) -> str:
    parts: dict[tuple[str, str], int] = {}
    for layer in layers:
        for state in layer.states:
            key = state.what, state.dtype or dtype
            parts[key] = parts.get(key, 0) + int(state.values * VALUE_BYTES[key[1]])
    held = ", ".join(f"{readable(size)} of {kind} {what}" for (what, kind), size in parts.items())
    instead = "beside" if layers[0].kind is Kind.PARALLEL else "instead of"
    return f"{len(layers)} of {count} layers hold a state {instead} tokens: {held}"


def _window_detail(layers: tuple[Layer, ...], count: int, _: str) -> str:
    newest = sorted({keep.window for layer in layers for keep in layer.keeps})
    return f"{len(layers)} of {count} layers keep the newest {' or '.join(f'{one:,}' for one in newest)} tokens"


def _compressed_detail(layers: tuple[Layer, ...], count: int, _: str) -> str:
    ratios = sorted({keep.ratio for layer in layers for keep in layer.keeps if keep.ratio > 1})
    one = " or ".join(str(ratio) for ratio in ratios)
    return f"{len(layers)} of {count} layers keep one entry for {one} tokens, and a window"


def _shared_detail(layers: tuple[Layer, ...], count: int, _: str) -> str:
    return f"{len(layers)} of {count} layers read the cache of an earlier layer"


# In the order of the plan.
_KINDS = (
    ("HybridState", (Kind.RECURRENT, Kind.PARALLEL), _state_detail),
    ("SharedLayers", (Kind.SHARED,), _shared_detail),
    ("SlidingWindow", (Kind.WINDOW,), _window_detail),
    ("CompressedAttention", (Kind.COMPRESSED,), _compressed_detail),
)


def _notes(shape: Shape, wish: Wish, dtype: str, held: Held) -> Iterable[str]:
    yield from shape.notes
    if shape.max_positions and wish.tokens > shape.max_positions:
        yield f"{wish.tokens:,} tokens are more than the model's context of {shape.max_positions:,}"
    if held.capped:
        window = max(keep.window for keep in held.windows)
        yield f"no layer keeps more than {window:,} tokens: from there on a sequence takes no more memory"
    if dtype in QUANTISED:
        yield f"payload alone: the scales of {dtype} pages come on top"
    if wish.pool is not None and held.total(wish.tokens, wish.block_tokens) > wish.pool:
        need = readable(held.total(wish.tokens, wish.block_tokens))
        yield f"not one sequence of {wish.tokens:,} tokens fits: it takes {need}"
