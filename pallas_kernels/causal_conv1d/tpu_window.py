"""Prefill of a causal convolution on TPU: a chunk of inputs in VMEM, and in front of it the tail.

A vector of 8 tokens that are `STEP` apart is one load with a stride, and so is the vector of the
tokens before them: no tap has to be moved from sublane to sublane.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import storage
from pallas_kernels.tpu_chip import LANES, SUBLANES
from pallas_kernels.tpu_rows import CHUNK, F32

MOST_TAPS = SUBLANES + 1
STEP = 4  # tokens from one sublane to the next, as fast as 2 and faster than 8 or 16


class Window(NamedTuple):
    """Scratch in VMEM of a kernel that goes over `tpu_rows.Segments`, for G = C / 128 channels."""

    inputs: Any  # f32[G, 8 + CHUNK, 128] the chunk, and 8 rows in front of it
    tail: Any  # f32[G, 8, 128] of which the last W - 1 are the inputs before the next segment
    slot: Any  # f32[W - 1, G, 128] the tail as it lies in the pool

    @classmethod
    def scratch(cls, channels: int, keep: int) -> "Window":
        """What the kernel asks for, for `keep` = W - 1."""
        groups = channels // LANES
        return cls(
            pltpu.VMEM((groups, SUBLANES + CHUNK, LANES), F32),
            pltpu.VMEM((groups, SUBLANES, LANES), F32),
            pltpu.VMEM((keep, groups, LANES), F32),
        )

    def start_row(self, before: Any, from_zeros: jax.Array) -> None:
        """Takes the tail of a row that begins from its slot, [1, W - 1, G, 128]."""
        # Selected, since the slot may hold anything.
        stored = storage.decode(before[0]).astype(F32)
        self.slot[...] = jnp.where(from_zeros, 0.0, stored)
        for row, j, g in self._places():
            self.tail[g, row : row + 1] = self.slot[j, g : g + 1]

    def end_row(self, after: Any) -> None:
        """Puts the tail of a row that ends into its slot."""
        for row, j, g in self._places():
            self.slot[j, g : g + 1] = self.tail[g, row : row + 1]
        after[0] = storage.encode(self.slot[...], after.dtype)

    def _places(self) -> list[tuple[int, int, int]]:
        keep, groups, _ = self.slot.shape
        return [(SUBLANES - keep + j, j, g) for j in range(keep) for g in range(groups)]

    def load(self, x: Any, begin: jax.Array, end: jax.Array) -> None:
        """A chunk [CHUNK, C], the tail in front of token `begin`, and the tail before `end`."""
        for g in range(self.inputs.shape[0]):
            self.inputs[g, SUBLANES:] = x[:, g * LANES : (g + 1) * LANES].astype(F32)
        row, low, high = self._around(begin)
        moved = pltpu.roll(self.tail[...], lax.rem(begin, SUBLANES), 1)
        self.inputs[:, low] = jnp.where(row, self.inputs[:, low], moved)
        self.inputs[:, high] = jnp.where(row, moved, self.inputs[:, high])
        row, low, high = self._around(end)
        both = jnp.where(row, self.inputs[:, high], self.inputs[:, low])
        self.tail[...] = pltpu.roll(both, lax.rem(SUBLANES - lax.rem(end, SUBLANES), SUBLANES), 1)

    def clear(self, begin: jax.Array, end: jax.Array) -> None:
        """Zeros for the inputs of other segments than that of tokens [begin, end)."""
        keep, groups, _ = self.slot.shape
        token = lax.broadcasted_iota(jnp.int32, self.inputs.shape[1:], 0) - SUBLANES
        ours = (token >= begin - keep) & (token < end)

        def group(g: jax.Array, _: None) -> None:
            self.inputs[g] = jnp.where(ours, self.inputs[g], 0.0)

        lax.fori_loop(0, groups, group, None)

    def _around(self, token: jax.Array) -> tuple[jax.Array, Any, Any]:
        """The 8 rows in front of a token lie in two tiles: which of the second one, and both."""
        row = lax.broadcasted_iota(jnp.int32, self.tail.shape, 1) < lax.rem(token, SUBLANES)
        low = token // SUBLANES * SUBLANES
        high = jnp.minimum(low + SUBLANES, CHUNK)  # at the end of the chunk there is one tile
        low, high = (pl.ds(pl.multiple_of(at, SUBLANES), SUBLANES) for at in (low, high))
        return row, low, high

    def convolve(self, g: Any, taps: Any, lanes: Any, activation: str | None) -> jax.Array:
        """f32[CHUNK, 128]: 128 channels of all tokens, which take the place of their inputs.

        `taps` is that of `taps_of`.
        """
        keep = self.slot.shape[0]
        weights = [taps[j : j + 1, lanes] for j in range(taps.shape[0])]
        every = [
            pl.ds(SUBLANES + first + n, SUBLANES, stride=STEP)
            for first in range(0, CHUNK, SUBLANES * STEP)
            for n in range(-keep, STEP)
        ]
        inputs = [self.inputs[g, rows] for rows in every]
        for at, rows in enumerate(every):
            if at % (STEP + keep) >= keep:
                total = weighted_sum(inputs[at - keep : at + 1], weights, activation)
                self.inputs[g, rows] = total
        return self.inputs[g, SUBLANES:]


def taps_of(weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """f32[W, C] from a layer's weight [C, W], oldest tap first; with a bias [C] it is row W."""
    rows = [weight.T, *([] if bias is None else [bias[None]])]
    return jnp.concatenate(rows).astype(F32)


def weighted_sum(
    inputs: Sequence[jax.Array], taps: Sequence[jax.Array], activation: str | None
) -> jax.Array:
    """Of W inputs, oldest first, and the rows of `taps_of`."""
    first, *terms = (x * tap for x, tap in zip(inputs, taps, strict=False))
    total = sum([*terms, *taps[len(inputs) :]], first)
    return total * lax.logistic(total) if activation == "silu" else total
