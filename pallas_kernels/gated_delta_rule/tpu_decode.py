"""Decode on TPU: one token per row, one transfer of each state in and one out.

The grid goes over (head blocks, rows). The pipeline fetches the state of row i + 1 from its read
slot while row i is computed and row i - 1 is on its way to its write slot. Rows are computed on
the vector units in float32: with one token per row, a matrix unit would spend its time loading the
state as weights.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.tpu_rows import F32, ROWS, decode_schedule, gates_by_block, head_part

Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def decode(
    tokens: Tokens,
    state: jax.Array,
    ragged: RaggedBatch,
    slots: tuple[jax.Array, jax.Array],
    *,
    heads: int,
    scale: float,
    l2norm: bool,
    vmem_limit: int,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """Decode rows of a batch; other rows touch no slot.

    `tokens` are q, k, v, g, beta of the first S tokens, `slots` the slots to read and to write, as
    for `api.gated_delta_rule`.

    Args:
        heads: value heads per grid step, see `tpu_chip.head_block`.
        vmem_limit: bytes of VMEM that the kernel may use.
        interpret: as for `pl.pallas_call`.

    Returns:
        out [S, Hv, dv], 0 for rows that do not decode, and the new `state`.
    """
    q, k, v, g, beta = tokens
    rows, v_heads, dv = v.shape
    dk = q.shape[2]
    blocks = v_heads // heads
    k_heads = max(1, q.shape[1] // blocks)
    per_channel = g.ndim == 3
    operands = [q, k, v, g] if per_channel else [q, k, v]
    columns = 2 * k_heads + heads * per_channel
    size = min(rows, ROWS)

    def part(x: jax.Array) -> pl.BlockSpec:
        lanes, index = head_part(x, blocks)
        return pl.BlockSpec((size, lanes), lambda j, i, *_: (i // size, index(j)))

    def slot(which: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, dk, dv), lambda j, i, *scalars: (scalars[which][i], j, 0, 0))

    gates = gates_by_block([beta] if per_channel else [beta, g], heads)
    kernel = functools.partial(_kernel, k_heads=k_heads, scale=scale, l2norm=l2norm)
    out, state = pl.pallas_call(
        kernel,
        name="gated_delta_decode",
        out_shape=(
            jax.ShapeDtypeStruct((rows, v_heads * dv), v.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(blocks, rows),
            in_specs=[
                *(part(x) for x in operands),
                pl.BlockSpec((1, size, gates.shape[2]), lambda j, i, *_: (j, i // size, 0)),
                slot(0),
            ],
            out_specs=(part(v), slot(1)),
            scratch_shapes=[
                pltpu.VMEM((size, -(-columns // 8) * 8, dk), F32),
                pltpu.VMEM((size, heads, dv), F32),
                pltpu.VMEM((size, heads, dv), F32),
            ],
        ),
        input_output_aliases={len(operands) + 5: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        interpret=interpret,
    )(
        *decode_schedule(ragged, slots),
        *(x.reshape(rows, -1) for x in operands),
        gates,
        state,
    )
    return out.reshape(v.shape), state


def _kernel(
    source, target, fresh, count, q, k, v, *refs, k_heads: int, scale: float, l2norm: bool
) -> None:
    """One row, for one block of heads.

    SMEM: source, target, fresh i32[S], count i32[1]. VMEM: q, k [R, Hk' dk]; v, out [R, Hv' dv];
    log decays [R, Hv' dk] if per channel; gates [1, R, n Hv'], beta and other log decays; before,
    after [1, Hv', dk, dv]; float32 scratch column_rows [R, n, dk], v_rows, out_rows [R, Hv', dv].
    """
    del source, target  # used by the index maps
    *log_decay, gates, before, out, after, column_rows, v_rows, out_rows = refs
    _, heads, dk, dv = before.shape
    size, group = q.shape[0], heads // k_heads
    i = pl.program_id(1)
    r = lax.rem(i, size)

    # All rows of a block at once: a packed bfloat16 tile cannot be read at a dynamic row.
    @pl.when(r == 0)
    def _prepare() -> None:
        for h in range(k_heads):
            lanes = slice(h * dk, (h + 1) * dk)
            qh, kh = q[:, lanes].astype(F32), k[:, lanes].astype(F32)
            if l2norm:
                qh, kh = (
                    x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6) for x in (qh, kh)
                )
            column_rows[:, h, :] = qh * scale
            column_rows[:, k_heads + h, :] = kh
        for h in range(heads):
            if log_decay:
                column_rows[:, 2 * k_heads + h, :] = jnp.exp(log_decay[0][:, h * dk : (h + 1) * dk])
            v_rows[:, h, :] = v[:, h * dv : (h + 1) * dv].astype(F32)
        out_rows[...] = jnp.zeros_like(out_rows)

    @pl.when(i < count[0])
    def _row() -> None:
        columns, gate = column_rows[r].T, gates[0, pl.ds(r, 1), :]
        beta = gate[:, :heads]
        decay = columns[:, 2 * k_heads :] if log_decay else jnp.exp(gate[:, heads:])
        from_zeros = fresh[i] == 1
        for h in range(heads):
            at = h // group
            qh, kh = columns[:, at : at + 1], columns[:, k_heads + at : k_heads + at + 1]
            # Selected, since the slot may hold anything.
            state = jnp.where(from_zeros, 0.0, before[0, h]) * decay[:, h : h + 1]
            memory = jnp.sum(state * kh, axis=0, keepdims=True)
            delta = beta[:, h : h + 1] * (v_rows[r, h : h + 1] - memory)
            state = state + kh * delta
            after[0, h] = state
            out_rows[r, h : h + 1] = jnp.sum(state * qh, axis=0, keepdims=True)

    # Without decode rows the null slot is written, with what it held.
    @pl.when((i == 0) & (count[0] == 0))
    def _nothing() -> None:
        after[...] = before[...]

    @pl.when((r == size - 1) | (i == pl.num_programs(1) - 1))
    def _finish() -> None:
        for h in range(heads):
            out[:, h * dv : (h + 1) * dv] = out_rows[:, h, :].astype(out.dtype)
