"""The work of a step, by hand for a model of all kinds of layers."""

from hybrid_jax.measure.scopes import Place
from hybrid_jax.measure.work import step_work
from hybrid_jax.models import config_from_hf
from hybrid_jax.specs import AttentionSpec, GatedDeltaSpec, MoESpec
from tests.helpers import tiny


def test_a_step_by_hand() -> None:
    """Two rows of three tokens after ten; every token of 64 numbers, the window of 8."""
    model = config_from_hf(tiny.TINY["lara_mini-untied"])
    window, linear, full = (layer.mixer for layer in model.layers)
    assert isinstance(window, AttentionSpec) and window.window == 8
    assert isinstance(full, AttentionSpec) and isinstance(linear, GatedDeltaSpec)
    work = {tuple(place): done for place, done in step_work(
        model, "bfloat16", rows=2, earlier=10, new=3
    ).items()}  # fmt: skip
    heads, kv = full.num_heads * full.head_dim, 2 * full.num_kv_heads * full.head_dim
    # Tokens 10, 11 and 12 see 11, 12 and 13 tokens; 13 are read and 3 written.
    assert work[2, "full", "paged_attention"] == (2 * 4 * heads * 36, 2 * 2 * kv * (13 + 3))
    # In the window 8 each; 10 are read, from position 3 on.
    assert work[0, "window", "paged_attention"] == (2 * 4 * heads * 24, 2 * 2 * kv * (10 + 3))
    state = linear.num_v_heads * linear.k_dim * linear.v_dim
    width, channels = linear.conv_width, linear.conv_channels
    assert work[1, "linear", "gated_delta_net"] == (
        7 * 6 * state + 2 * 6 * width * channels,
        2 * 4 * 2 * state + 2 * 2 * 2 * (width - 1) * channels,
    )
    ffn = model.layers[2].ffn
    assert isinstance(ffn, MoESpec) and (ffn.num_experts, ffn.top_k) == (4, 2)
    expert = 3 * model.hidden_size * ffn.intermediate_size
    always = model.hidden_size * (4 + 3 * ffn.shared_intermediate_size)  # router, shared expert
    assert work[2, "full", "ffn"] == (2 * 6 * (always + 2 * expert), 2 * (always + 4 * expert))
    table = model.vocab_size * model.hidden_size
    assert work[None, "head", "head"] == (2 * 2 * table, 2 * table)
    assert work[None, "embed", "embed"] == (0, 2 * 6 * model.hidden_size)


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    """One token reads two of four experts, a thousand tokens all of them."""
    model = config_from_hf(tiny.TINY["lara_mini-untied"])
    place = Place(0, "window", "ffn")
    few, many = (
        step_work(model, "float32", rows=rows, earlier=0, new=1)[place] for rows in (1, 1000)
    )
    ffn = model.layers[0].ffn
    assert isinstance(ffn, MoESpec) and (ffn.num_experts, ffn.top_k) == (4, 2)
    expert = 3 * model.hidden_size * ffn.intermediate_size
    assert many.nbytes - few.nbytes == 4 * 2 * expert and many.flops == 1000 * few.flops
