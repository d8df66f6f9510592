"""Readers of models whose layers all attend: plain, windowed, latent and compressed. Fields in, layers out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvsteward_bench.plan.config_fields import MOST, Fields
from kvsteward_bench.plan.errors import CannotPlan
from kvsteward_bench.plan.shape import Heads, Keep, Kind, Layer, State

ATTENTION = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Read:
    """What a reader found."""

    layers: tuple[Layer, ...]
    heads: Heads
    kv_heads: int


def heads_of(fields: Fields) -> tuple[int, int, int]:
    """Query heads, KV heads, head dimension."""
    queries = fields.integer("num_attention_heads")
    kv = fields.integer_or("num_key_value_heads", queries)
    if queries % kv:
        raise CannotPlan(f"{fields.where}: {queries} query heads are not a multiple of {kv} KV heads")
    if fields.get("head_dim") is not None:
        return queries, kv, fields.integer("head_dim")
    hidden = fields.integer("hidden_size")
    return queries, kv, hidden // queries


def sharing(queries: int, kv: int) -> Heads:
    if kv == queries:
        return Heads.MHA
    return Heads.MQA if kv == 1 else Heads.GQA


def attention(alone: int, full: int, window: int = 0) -> Layer:
    return Layer(Kind.WINDOW if window else Kind.FULL, alone, full, (Keep(full, window),))


def plain(fields: Fields) -> Read:
    """Llama and its like: one kind of attention in all layers, with an optional window and cross-layer sharing."""
    queries, kv, dim = heads_of(fields)
    count = fields.integer("num_hidden_layers")
    alone, full = 2 * queries * dim, 2 * kv * dim
    types = fields.layer_types(ATTENTION, count)
    window = fields.integer_or("sliding_window", 0, least=0)
    if fields.get("use_sliding_window") is False or window >= fields.integer_or("max_position_embeddings", MOST):
        window = 0  # no context that the model has is longer
    if types is None:
        first = fields.integer_or("max_window_layers", 0, least=0) if fields.get("use_sliding_window") else 0
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    layers = tuple(attention(alone, full, window if one == "sliding_attention" else 0) for one in types)
    return Read(_cross_layer(fields, layers), sharing(queries, kv), kv)


def _cross_layer(fields: Fields, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """use_cla: of each `cla_share_factor` layers in a row the first keeps keys and values for all."""
    if not fields.get("use_cla"):
        return layers
    factor = fields.integer("cla_share_factor", least=2)
    return tuple(_shared(layer) if i % factor else layer for i, layer in enumerate(layers))


def _shared(layer: Layer) -> Layer:
    return Layer(Kind.SHARED, layer.alone, layer.full, ())


def windowed(fields: Fields) -> Read:
    """Local and global layers in turn: Gemma, gpt-oss. The last `num_kv_shared_layers` read earlier layers' caches."""
    queries, kv, dim = heads_of(fields)
    count = fields.integer("num_hidden_layers")
    window = fields.integer("sliding_window")
    types = fields.layer_types(ATTENTION, count)
    if types is None:
        period = fields.integer_or("sliding_window_pattern", fields.defaults["period"])
        types = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    global_dim, global_kv = dim, kv
    if "global_head_dim" in fields.defaults:  # Gemma 4: global layers have heads of their own
        types[-1] = "full_attention"
        global_dim = fields.integer("global_head_dim")
        if fields.get("attention_k_eq_v"):
            global_kv = fields.integer_or("num_global_key_value_heads", kv)
    local = attention(2 * queries * dim, 2 * kv * dim, window)
    whole = attention(2 * queries * global_dim, 2 * global_kv * global_dim)
    first_shared = count - fields.integer_or("num_kv_shared_layers", 0, least=0)
    layers = [whole if one == "full_attention" else local for one in types]
    if 0 < first_shared < count:
        layers = [_shared(one) if i >= first_shared else one for i, one in enumerate(layers)]
    return Read(tuple(layers), sharing(queries, kv), kv)


def latent(fields: Fields) -> Read:
    """DeepSeek-V2 and V3: a latent and a rotary key. V3.2 keeps an index key beside them and reads the best tokens."""
    queries, count = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    rope = fields.integer("qk_rope_head_dim")
    values = fields.integer("kv_lora_rank") + rope
    alone = queries * (fields.integer("qk_nope_head_dim") + rope + fields.integer("v_head_dim"))
    keeps: tuple[Keep, ...] = (Keep(values),)
    if fields.get("index_topk"):
        keeps = (Keep(values, top=fields.integer("index_topk")), Keep(fields.integer("index_head_dim")))
    full = sum(keep.values for keep in keeps)
    return Read((Layer(Kind.FULL, alone, full, keeps),) * count, Heads.MLA, 1)


def compressed(fields: Fields) -> Read:
    """DeepSeek-V4: one head that is key and value at once; a window in every layer, and beside it one entry for 4
    tokens (of which an indexer chooses the best) or for 128. What isn't a whole group yet waits in a buffer."""
    queries, dim, count = (fields.integer(name) for name in ("num_attention_heads", "head_dim", "num_hidden_layers"))
    window, index = fields.integer("sliding_window"), fields.integer("index_head_dim")
    top = fields.integer("index_topk")
    rates = fields.get("compress_rates")
    if not isinstance(rates, Mapping):
        raise CannotPlan(f"{fields.where}: compress_rates is {rates!r}; a mapping of layer types is needed")
    rates = Fields(rates, fields.where, fields.defaults["compress_rates"])
    sparse = rates.integer_or("compressed_sparse_attention", fields.integer_or("compress_rate_csa", 4))
    heavy = rates.integer_or("heavily_compressed_attention", fields.integer_or("compress_rate_hca", 128))
    alone, local = 2 * queries * dim, Keep(dim, window)
    # Values and gates of an unfinished group; the sparse kind has two series of both, and the first of the last group.
    kinds = {
        "sliding_attention": Layer(Kind.WINDOW, alone, dim, (local,)),
        "compressed_sparse_attention": Layer(
            Kind.COMPRESSED,
            alone,
            dim,
            (local, Keep(dim, ratio=sparse, top=top), Keep(index, ratio=sparse)),
            (State("compression buffers", 6 * sparse * (dim + index)),),
        ),
        "heavily_compressed_attention": Layer(
            Kind.COMPRESSED,
            alone,
            dim,
            (local, Keep(dim, ratio=heavy)),
            (State("compression buffers", 2 * heavy * dim),),
        ),
    }
    types = fields.layer_types(frozenset(kinds), count) or _compression_schedule(fields, count)
    return Read(tuple(kinds[one] for one in types), Heads.MQA, 1)


def _compression_schedule(fields: Fields, count: int) -> list[str]:
    """`compress_ratios` of the published files; without it two heavy layers and then both kinds in turn."""
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    ratios = fields.get("compress_ratios")
    if ratios is None:
        return [names[4] if i >= 2 and i % 2 else names[128] for i in range(count)]
    if not isinstance(ratios, list) or len(ratios) < count or any(one not in names for one in ratios):
        raise CannotPlan(f"{fields.where}: compress_ratios must name 0, 4 or 128 for each of the {count} layers")
    return [names[one] for one in ratios[:count]]
