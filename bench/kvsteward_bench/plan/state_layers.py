"""Readers of models with recurrent layers, whose state has the same size however long the sequence is."""

from __future__ import annotations

from kvsteward_bench.plan.attention_layers import Read, attention, heads_of, sharing
from kvsteward_bench.plan.config_fields import Fields
from kvsteward_bench.plan.shape import Keep, Kind, Layer, State


def gated_delta(fields: Fields) -> Read:
    """Qwen3-Next: three Gated DeltaNet layers, whose state is float32, then one of full attention."""
    queries, kv, dim = heads_of(fields)
    count = fields.integer("num_hidden_layers")
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    value_heads, value_dim = fields.integer("linear_num_value_heads"), fields.integer("linear_value_head_dim")
    recurrent = value_heads * fields.integer("linear_key_head_dim") * value_dim
    convolution = (2 * keys + value_heads * value_dim) * fields.integer("linear_conv_kernel_dim")
    whole = attention(2 * queries * dim, 2 * kv * dim)
    states = (State("recurrent state", recurrent, "FP32"), State("convolution inputs", convolution))
    linear = Layer(Kind.RECURRENT, whole.alone, whole.full, (), states)
    types = fields.layer_types(frozenset({"full_attention", "linear_attention"}), count)
    if types is None:
        period = fields.integer("full_attention_interval")
        types = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    layers = tuple(linear if one == "linear_attention" else whole for one in types)
    return Read(layers, sharing(queries, kv), kv)


def jamba(fields: Fields) -> Read:
    """One layer of attention in `attn_layer_period`, Mamba layers elsewhere."""
    queries, kv, dim = heads_of(fields)
    inner = fields.integer("hidden_size") * fields.integer("mamba_expand")
    whole = attention(2 * queries * dim, 2 * kv * dim)
    states = (
        State("recurrent state", inner * fields.integer("mamba_d_state")),
        State("convolution inputs", inner * fields.integer("mamba_d_conv")),
    )
    mamba = Layer(Kind.RECURRENT, whole.alone, whole.full, (), states)
    period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", least=0)
    count = fields.integer("num_hidden_layers")
    layers = tuple(whole if i % period == offset else mamba for i in range(count))
    return Read(layers, sharing(queries, kv), kv)


def falcon_h1(fields: Fields) -> Read:
    """Every layer has attention and a Mamba-2 state side by side."""
    queries, kv, dim = heads_of(fields)
    inner = fields.integer_or("mamba_d_ssm", fields.integer("hidden_size") * fields.integer("mamba_expand"))
    state = fields.integer("mamba_d_state")
    convolved = inner + 2 * fields.integer("mamba_n_groups") * state
    full = 2 * kv * dim
    states = (
        State("recurrent state", inner * state),
        State("convolution inputs", convolved * fields.integer("mamba_d_conv")),
    )
    layer = Layer(Kind.PARALLEL, 2 * queries * dim, full, (Keep(full),), states)
    return Read((layer,) * fields.integer("num_hidden_layers"), sharing(queries, kv), kv)
