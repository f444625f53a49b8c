"""Kernels compile for every TPU generation, and update their pools in place."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import RaggedBatch, gated_delta_net, gated_delta_rule, mamba2
from pallas_kernels.causal_conv1d import causal_conv1d, state_shape
from pallas_kernels.causal_conv1d.cases import CASES as CONVOLUTION_CASES
from pallas_kernels.gated_delta_net.cases import CASES as NET_CASES
from pallas_kernels.gated_delta_rule.cases import CASES, Case
from pallas_kernels.gla import gla
from pallas_kernels.gla.cases import CASES as GLA_CASES
from pallas_kernels.gla.cases import Case as GlaCase
from pallas_kernels.mamba2.cases import CASES as MAMBA2_CASES
from pallas_kernels.rows import clear_rows, copy_rows
from pallas_kernels.rows.cases import CASES as ROWS
from pallas_kernels.rwkv7 import rwkv7
from pallas_kernels.rwkv7.cases import CASES as RWKV7_CASES
from pallas_kernels.rwkv7.cases import Case as Rwkv7Case
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.selective_scan.cases import CASES as SCAN_CASES
from pallas_kernels.selective_scan.cases import Case as ScanCase
from pallas_kernels.ssd import ssd
from pallas_kernels.ssd.cases import CASES as SSD_CASES
from pallas_kernels.ssd.cases import Case as SsdCase
from tests.helpers.tpu import EVERY_CHIP, FREE, check_in_place, compile_for, needs_libtpu, results

pytestmark = needs_libtpu
CONVOLUTION = {case.name: case for case in CONVOLUTION_CASES}
GATED_DELTA = {case.name: case for case in CASES}
GLA = {case.name: case for case in GLA_CASES}
NETS = {case.name: case for case in NET_CASES}
FUSED_DECODE = ("gated_delta_net_decode",)
FUSED_MAMBA2 = ("mamba2_decode",)
MAMBA2 = {case.name: case for case in MAMBA2_CASES}
SSD = {case.name: case for case in SSD_CASES}
RWKV7 = {case.name: case for case in RWKV7_CASES}
SCAN = {case.name: case for case in SCAN_CASES}


def shape(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def gated_delta_arguments(case: Case, tokens: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v as layers have them, flat; g, beta, state, row boundaries and slots."""
    keys, values = case.num_k_heads * case.k_dim, case.num_v_heads * case.v_dim
    qkv = (shape(case.dtype, tokens, width) for width in (keys, keys, values))
    beta = shape("float32", tokens, case.num_v_heads)
    g = shape("float32", *beta.shape, *[case.k_dim] * case.per_channel)
    state = shape("float32", 2 * rows + 1, case.num_v_heads, case.k_dim, case.v_dim)
    return (*qkv, g, beta, state, *batch_arguments(rows))


def batch_arguments(rows: int) -> list[jax.ShapeDtypeStruct]:
    """Row boundaries, lengths and counts of a batch, and slots to read and to write."""
    return [shape("int32", n) for n in (rows + 1, rows, 2, rows, rows)]


def gated_delta(case: Case, decode_only: bool):
    def run(q, k, v, g, beta, state, starts, lens, counts, read, write):
        tokens = q.shape[0]
        q, k = (x.reshape(tokens, case.num_k_heads, case.k_dim) for x in (q, k))
        v = v.reshape(tokens, case.num_v_heads, case.v_dim)
        ragged = RaggedBatch(starts, lens, counts, decode_only)
        out, state = gated_delta_rule.gated_delta_rule(q, k, v, g, beta, state, ragged, read, write)
        return out.reshape(tokens, -1), state

    return run


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(
    ("name", "rows"),
    [("qwen35_9b", 1), ("qwen35_9b", 20), ("qwen35_9b", 256), ("qwen3_next_80b", 64),
     ("kimi_linear_48b", 20)],
)  # fmt: skip
def test_gated_delta_rule_decode(name: str, rows: int, chip: str) -> None:
    case = GATED_DELTA[name]
    arguments = gated_delta_arguments(case, rows, rows)
    compiled = compile_for(chip, gated_delta(case, True), arguments, donate=(5,))
    check_in_place(compiled, arguments[5], kernels=("gated_delta_decode",))


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(
    ("name", "tokens", "rows"),
    [("qwen35_9b", 300, 20), ("qwen3_next_80b", 64, 8), ("kimi_linear_48b", 300, 20)],
)
def test_gated_delta_rule_mixed(name: str, tokens: int, rows: int, chip: str) -> None:
    case = GATED_DELTA[name]
    arguments = gated_delta_arguments(case, tokens, rows)
    compiled = compile_for(chip, gated_delta(case, False), arguments, donate=(5,))
    kernels = ("gated_delta_decode", "gated_delta_prefill")
    check_in_place(compiled, arguments[5], kernels=kernels)


def gla_arguments(case: GlaCase, tokens: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, g as layers have them, flat; state, row boundaries and slots."""
    keys, values = case.num_k_heads * case.k_dim, case.num_v_heads * case.v_dim
    decays = case.num_v_heads * (case.k_dim if case.per_channel else 1)
    return (
        *(shape(case.dtype, tokens, width) for width in (keys, keys, values)),
        shape("float32", tokens, decays),
        shape("float32", 2 * rows + 1, case.num_v_heads, case.k_dim, case.v_dim),
        *(shape("int32", n) for n in (rows + 1, rows, 2, rows, rows)),
    )


def run_gla(case: GlaCase, decode_only: bool):
    def run(q, k, v, g, state, starts, lens, counts, read, write):
        tokens = q.shape[0]
        q, k = (x.reshape(tokens, case.num_k_heads, case.k_dim) for x in (q, k))
        v = v.reshape(tokens, case.num_v_heads, case.v_dim)
        if case.per_channel:
            g = g.reshape(tokens, case.num_v_heads, case.k_dim)
        ragged = RaggedBatch(starts, lens, counts, decode_only)
        out, state = gla(q, k, v, g, state, ragged, read, write)
        return out.reshape(tokens, -1), state

    return run


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize("name", ["minimax_text_01", "gla_1b"])
def test_gla_decode(name: str, chip: str) -> None:
    arguments = gla_arguments(GLA[name], 20, 20)
    compiled = compile_for(chip, run_gla(GLA[name], True), arguments, donate=(4,))
    check_in_place(compiled, arguments[4], kernels=("gla_decode",))


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize("name", ["minimax_text_01", "gla_1b"])
def test_gla_mixed(name: str, chip: str) -> None:
    arguments = gla_arguments(GLA[name], 300, 20)
    compiled = compile_for(chip, run_gla(GLA[name], False), arguments, donate=(4,))
    check_in_place(compiled, arguments[4], kernels=("gla_decode", "gla_prefill"))


def compile_net(chip: str, name: str, tokens: int, rows: int, kernels: Sequence[str]) -> None:
    case, slots = NETS[name], 2 * rows + 1
    heads = shape("float32", case.num_v_heads)
    decays = shape("float32", *heads.shape, *[case.k_dim] * case.per_channel)
    a, b = (shape(case.dtype, tokens, *x.shape) for x in (decays, heads))
    conv = shape(case.dtype, *state_shape(slots, case.width - 1, case.channels))
    recurrent = shape("float32", slots, case.num_v_heads, case.k_dim, case.v_dim)
    weights = shape(case.dtype, case.channels, case.width), None, heads, decays
    batch = [shape("int32", n) for n in (rows + 1, rows, 2, rows, rows)]

    def run(conv, recurrent, qkv, a, b, weights, starts, lens, counts, read, write):
        ragged = RaggedBatch(starts, lens, counts, tokens == rows)
        states = gated_delta_net.States(conv, recurrent)
        out, states = gated_delta_net.gated_delta_net(
            qkv, a, b, states, ragged, read, write,
            weights=gated_delta_net.Weights(*weights), k_heads=case.num_k_heads,
        )  # fmt: skip
        return out.reshape(tokens, -1), *states

    qkv = shape(case.dtype, tokens, case.channels)
    arguments = (conv, recurrent, qkv, a, b, weights, *batch)
    compiled = compile_for(chip, run, arguments, donate=(0, 1))
    check_in_place(compiled, recurrent, kernels=kernels)
    # Other kernels leave XLA some vector memory, which it may use for inputs.
    if kernels == FUSED_DECODE:
        assert {opcode for opcode, dims in results(compiled) if dims == conv.shape} <= FREE


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(
    ("name", "rows"),
    [("qwen35_9b", 1), ("qwen35_9b", 20), ("qwen35_9b", 256), ("qwen3_next_80b", 64)],
)
def test_gated_delta_net_decode(name: str, rows: int, chip: str) -> None:
    compile_net(chip, name, rows, rows, FUSED_DECODE)


@pytest.mark.parametrize("chip", EVERY_CHIP)
def test_gated_delta_net_decode_with_decays_per_channel(chip: str) -> None:
    """Separate ops run it."""
    compile_net(chip, "kimi_linear_48b", 20, 20, ("causal_conv1d_decode", "gated_delta_decode"))


# On v4 the separate ops run it.
@pytest.mark.parametrize("chip", [chip for chip in EVERY_CHIP if "v4" not in str(chip)])
def test_gated_delta_net_mixed(chip: str) -> None:
    compile_net(chip, "qwen35_9b", 1024, 40, (*FUSED_DECODE, "gated_delta_net_prefill"))


def ssd_arguments(case: SsdCase, tokens: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x, B, C as layers have them, flat; dt, A, D, dt_bias, state, row boundaries and slots."""
    widths = (case.heads * case.head_dim, *[case.groups * case.state_size] * 2, case.heads)
    state = shape("float32", 2 * rows + 1, case.state_size, case.heads * case.head_dim)
    return (
        *(shape(case.dtype, tokens, width) for width in widths),
        *[shape("float32", case.heads)] * 3,
        state,
        *batch_arguments(rows),
    )


def run_ssd(case: SsdCase, decode_only: bool):
    def run(x, B, C, dt, A, D, dt_bias, state, starts, lens, counts, read, write):
        tokens = x.shape[0]
        x = x.reshape(tokens, case.heads, case.head_dim)
        B, C = (w.reshape(tokens, case.groups, case.state_size) for w in (B, C))
        ragged = RaggedBatch(starts, lens, counts, decode_only)
        y, state = ssd(x, dt, A, B, C, D, dt_bias, state, ragged, read, write)
        return y.reshape(tokens, -1), state

    return run


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(
    ("name", "rows"), [("nemotron_3_nano", 1), ("nemotron_3_nano", 64), ("bamba_9b", 20),
                       ("falcon_h1_7b", 20)],
)  # fmt: skip
def test_ssd_decode(name: str, rows: int, chip: str) -> None:
    arguments = ssd_arguments(SSD[name], rows, rows)
    compiled = compile_for(chip, run_ssd(SSD[name], True), arguments, donate=(7,))
    check_in_place(compiled, arguments[7], kernels=("ssd_decode",))


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize("name", ["nemotron_3_nano", "bamba_9b", "falcon_h1_7b"])
def test_ssd_mixed(name: str, chip: str) -> None:
    arguments = ssd_arguments(SSD[name], 300, 20)
    compiled = compile_for(chip, run_ssd(SSD[name], False), arguments, donate=(7,))
    check_in_place(compiled, arguments[7], kernels=("ssd_decode", "ssd_prefill"))


def compile_mamba2(chip: str, name: str, tokens: int, rows: int, kernels: Sequence[str]) -> None:
    case, slots = MAMBA2[name], 2 * rows + 1
    weight, bias, xBC, dt, conv = (
        shape(case.dtype, *dims)
        for dims in (
            (case.channels, case.width),
            (case.channels,),
            (tokens, case.channels),
            (tokens, case.heads),
            state_shape(slots, case.width - 1, case.channels),
        )
    )
    recurrent = shape("float32", slots, case.state_size, case.heads * case.head_dim)
    weights = mamba2.Weights(weight, bias, *[shape("float32", case.heads)] * 3)

    def run(conv, recurrent, xBC, dt, weights, starts, lens, counts, read, write):
        ragged = RaggedBatch(starts, lens, counts, tokens == rows)
        states = mamba2.States(conv, recurrent)
        return mamba2.mamba2(xBC, dt, states, ragged, read, write, weights=weights)

    arguments = (conv, recurrent, xBC, dt, weights, *batch_arguments(rows))
    compiled = compile_for(chip, run, arguments, donate=(0, 1))
    check_in_place(compiled, recurrent, kernels=kernels)
    # Other kernels leave XLA some vector memory, which it may use for inputs.
    if kernels == FUSED_MAMBA2:
        assert {opcode for opcode, dims in results(compiled) if dims == conv.shape} <= FREE


@pytest.mark.parametrize("chip", EVERY_CHIP)
def test_mamba2_decode(chip: str) -> None:
    two_cores = chip in ("v4", "v5p")
    separate = ("causal_conv1d_decode", "ssd_decode")
    compile_mamba2(chip, "nemotron_3_nano", 64, 64, separate if two_cores else FUSED_MAMBA2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"), [("nemotron_3_nano", 1), ("bamba_9b", 20), ("falcon_h1_7b", 20)]
)
def test_mamba2_decode_of_other_shapes(name: str, rows: int) -> None:
    compile_mamba2("v6e", name, rows, rows, FUSED_MAMBA2)


@pytest.mark.slow
def test_mamba2_mixed() -> None:
    kernels = [
        f"{op}_{phase}" for op in ("causal_conv1d", "ssd") for phase in ("decode", "prefill")
    ]
    compile_mamba2("v6e", "nemotron_3_nano", 300, 20, kernels)


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(
    ("name", "tokens", "rows"), [("qwen35_9b", 64, 64), ("lfm2_1b", 1, 1), ("qwen35_9b", 300, 20)]
)
def test_causal_conv1d(name: str, tokens: int, rows: int, chip: str) -> None:
    case, mixed = CONVOLUTION[name], tokens > rows
    x, weight, pool = (
        shape(case.dtype, *dims)
        for dims in (
            (tokens, case.channels),
            (case.channels, case.width),
            state_shape(1000, case.width - 1, case.channels),
        )
    )

    def run(x, weight, state, starts, lens, counts, read, write):
        ragged = RaggedBatch(starts, lens, counts, not mixed)
        return causal_conv1d(
            x, weight, None, state, ragged, read, write, activation=case.activation
        )

    compiled = compile_for(chip, run, (x, weight, pool, *batch_arguments(rows)), donate=(2,))
    kernels = ("causal_conv1d_decode", *["causal_conv1d_prefill"] * mixed)
    check_in_place(compiled, pool, kernels=kernels)


MIXED = pytest.param(300, 256, marks=pytest.mark.slow)


def rwkv7_arguments(case: Rwkv7Case, tokens: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """r, w, k, v, a, b as layers have them, flat; state, row boundaries and slots."""
    keys = shape(case.dtype, tokens, case.heads * case.k_dim)
    values = shape(case.dtype, tokens, case.heads * case.v_dim)
    state = shape("float32", 2 * rows + 1, case.k_dim, values.shape[1])
    w = shape("float32", *keys.shape)
    return (keys, w, keys, values, keys, keys, state, *batch_arguments(rows))


def run_rwkv7(case: Rwkv7Case, decode_only: bool):
    def run(r, w, k, v, a, b, state, starts, lens, counts, read, write):
        operands = (x.reshape(x.shape[0], case.heads, -1) for x in (r, w, k, v, a, b))
        ragged = RaggedBatch(starts, lens, counts, decode_only)
        out, state = rwkv7(*operands, state, ragged, read, write)
        return out.reshape(v.shape), state

    return run


def scan_arguments(case: ScanCase, tokens: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x, dt, A, B, C, D, dt_bias, state, row boundaries and slots."""
    x = shape(case.dtype, tokens, case.channels)
    weights = shape(case.dtype, tokens, case.state_size)
    A = shape("float32", case.state_size, case.channels)
    state = shape("float32", 2 * rows + 1, *A.shape)
    return (x, x, A, weights, weights, *[shape("float32", case.channels)] * 2, state,
            *batch_arguments(rows))  # fmt: skip


def run_scan(decode_only: bool):
    def run(x, dt, A, B, C, D, dt_bias, state, starts, lens, counts, read, write):
        ragged = RaggedBatch(starts, lens, counts, decode_only)
        return selective_scan(x, dt, A, B, C, D, dt_bias, state, ragged, read, write)

    return run


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), MIXED])
def test_rwkv7(tokens: int, rows: int, chip: str) -> None:
    case, mixed = RWKV7["rwkv7_2b9"], tokens > rows
    arguments = rwkv7_arguments(case, tokens, rows)
    compiled = compile_for(chip, run_rwkv7(case, not mixed), arguments, donate=(6,))
    check_in_place(compiled, arguments[6], kernels=("rwkv7_decode",), loop=mixed)


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), MIXED])
def test_selective_scan(tokens: int, rows: int, chip: str) -> None:
    mixed = tokens > rows
    arguments = scan_arguments(SCAN["falcon_mamba_7b"], tokens, rows)
    compiled = compile_for(chip, run_scan(not mixed), arguments, donate=(7,))
    check_in_place(compiled, arguments[7], kernels=("selective_scan_decode",), loop=mixed)


@pytest.mark.parametrize("chip", EVERY_CHIP)
@pytest.mark.parametrize("name", ["qwen35_9b_slots", "qwen35_9b_pages", "nemotron_3_nano_slots"])
def test_rows(name: str, chip: str) -> None:
    case = {case.name: case for case in ROWS}[name]
    pool = shape(case.dtype, *case.shape)

    def run(pool, sources, targets, cleared):
        return clear_rows(copy_rows(pool, sources, targets), cleared)

    compiled = compile_for(chip, run, (pool, *[shape("int32", 8)] * 3), donate=(0,))
    check_in_place(compiled, pool, kernels=("copy_rows", "clear_rows"))


def test_a_copy_of_the_pool_is_seen() -> None:
    """What `check_in_place` is for: a pool that was not donated has to be copied."""
    case = GATED_DELTA["qwen35_9b"]
    arguments = gated_delta_arguments(case, 8, 8)
    compiled = compile_for("v6e", gated_delta(case, True), arguments)
    with pytest.raises(AssertionError, match="pool-sized results"):
        check_in_place(compiled, arguments[5], kernels=("gated_delta_decode",))
