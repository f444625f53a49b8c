"""What every mixer of a step shares."""

from dataclasses import dataclass

import jax

from hybrid_jax.cache.arrays import StateSlots
from hybrid_jax.layers.rope import cos_sin
from hybrid_jax.specs import AttentionSpec, LayerSpec, RopeSpec
from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.recurrence import SlotOp, State, together, token_by_token

RopeTables = dict[RopeSpec, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class StepContext:
    """Row boundaries, and cos/sin float32[T, dim / 2] of every rope that some layer uses."""

    ragged: RaggedBatch
    rope: RopeTables
    verify: bool = False  # the state after every token is kept, see `StepKind.VERIFY`

    def slot_to_slot(
        self, op: SlotOp[State], tokens: tuple[jax.Array, ...], state: State, table: StateSlots
    ) -> tuple[jax.Array, State]:
        """Runs an op with state over the batch: its out [T, ...], and the new `state`."""
        run = token_by_token if self.verify else together
        return run(op, tokens, state, self.ragged, table.read, table.write)


def rope_tables(layers: tuple[LayerSpec, ...], positions: jax.Array) -> RopeTables:
    """One table per distinct rope; positions i32[T]."""
    mixers = [layer.mixer for layer in layers]
    specs = {mixer.rope for mixer in mixers if isinstance(mixer, AttentionSpec) and mixer.rope}
    return {spec: cos_sin(positions, spec) for spec in specs}
