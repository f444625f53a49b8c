"""Copying and clearing rows on TPU: one transfer per row, all of them on their way together."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_chip
from pallas_kernels.registry import Facts

ZEROS = 1 << 20  # bytes of zeros that the clearing kernel keeps in VMEM, at most


def write(
    pool: jax.Array, sources: jax.Array | None, targets: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """See `api.copy_rows`, and without sources `api.clear_rows`.

    `interpret` is that of `pl.pallas_call`, for tests on CPU.
    """
    lists = (targets,) if sources is None else (sources, targets)
    scratch: list[Any] = [pltpu.SemaphoreType.DMA]
    if sources is None:
        part = _part(pool.shape, pool.dtype.itemsize)
        scratch.append(pltpu.VMEM((part, *pool.shape[2:]), pool.dtype))
    return pl.pallas_call(
        _clear_kernel if sources is None else _copy_kernel,
        name="clear_rows" if sources is None else "copy_rows",
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(lists): 0},
        interpret=interpret,
    )(*lists, pool)


def refuses(facts: Facts) -> str | None:
    """Why these kernels cannot run, or None."""
    reason = tpu_chip.refuses(facts)
    if reason is not None:
        return reason
    pool = facts.values["pool"]
    if pool.dtype not in ("bfloat16", "float32", "int32", "uint32"):
        return f"pool must be of 16-bit or 32-bit numbers, not {pool.dtype}"
    if len(pool.shape) < 3 or pool.shape[-1] % tpu_chip.LANES:
        # XLA would lay it out in another order, and copy all of it for the kernel.
        return f"rows must be [..., multiple of {tpu_chip.LANES}], not {pool.shape[1:]}"
    if len(pool.shape) == 3 and pool.shape[1] % (8 * 4 // jnp.dtype(pool.dtype).itemsize):
        return f"rows must be whole tiles, not {pool.shape[1:]} of {pool.dtype}"
    return None


def _part(shape: tuple[int, ...], itemsize: int) -> int:
    """How many of a row's leading entries are cleared by one transfer: a divisor of shape[1]."""
    each = math.prod(shape[2:]) * itemsize
    fitting = [n for n in range(1, shape[1] + 1) if shape[1] % n == 0 and n * each <= ZEROS]
    return max(fitting, default=1)


def _all_at_once(count: int, copies: Callable[[jax.Array, Callable[[Any], None]], None]) -> None:
    """Starts the transfers of rows 0 .. count - 1, then waits for them."""
    lax.fori_loop(0, count, lambda i, _: copies(i, lambda copy: copy.start()), None)
    lax.fori_loop(0, count, lambda i, _: copies(i, lambda copy: copy.wait()), None)


def _copy_kernel(sources: Any, targets: Any, _: Any, pool: Any, sem: Any) -> None:
    def copies(i: jax.Array, act: Callable[[Any], None]) -> None:
        source, target = sources[i], targets[i]

        @pl.when((target != 0) & (source != target))
        def _() -> None:
            act(pltpu.make_async_copy(pool.at[source], pool.at[target], sem))

    _all_at_once(sources.shape[0], copies)


def _clear_kernel(rows: Any, _: Any, pool: Any, sem: Any, zeros: Any) -> None:
    zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
    part = zeros.shape[0]

    def copies(i: jax.Array, act: Callable[[Any], None]) -> None:
        row = rows[i]

        @pl.when(row != 0)
        def _() -> None:
            for begin in range(0, pool.shape[1], part):
                act(pltpu.make_async_copy(zeros, pool.at[row, pl.ds(begin, part)], sem))

    _all_at_once(rows.shape[0], copies)
