"""One sequence whose logits, caches and states are in the caller's hands."""

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from hybrid_jax.cache.snapshot import Snapshot
from hybrid_jax.decoding.memory import Memory
from hybrid_jax.errors import InvalidRequest, SnapshotError
from hybrid_jax.fields import shown
from hybrid_jax.layers.mixers.attention import kv_scales
from hybrid_jax.runtime.batch import Returns, StepKind, StepOutput
from hybrid_jax.specs import AttentionSpec, WindowSpec
from pallas_kernels.storage import LARGEST, encode

if TYPE_CHECKING:
    from hybrid_jax.decoding.workspace import Workspace


class KV(NamedTuple):
    """Keys and values that an attention layer can still see: those of positions start, ..."""

    start: int
    # [positions, K, H], in the dtype of the cache; float32 if it is of bytes
    keys: np.ndarray
    values: np.ndarray  # [positions, K, H]


class Session:
    """Made by `Workspace.session`, `Workspace.restore` and `fork`. Not thread-safe.

    `LLM.session` is a conversation: text in, text out, batched with whatever else the engine runs.
    This is the level below it. You feed tokens and get logits, and everything that the model
    remembers can be forked, taken back, read and edited. A `Snapshot` goes from one to the other.

    `token_ids` are all tokens fed so far. Pages and slots are given back by `close()`, at the end
    of a `with` block, or when the session is garbage.
    """

    close: weakref.finalize

    def __init__(self, workspace: "Workspace", memory: Memory, token_ids: list[int]) -> None:
        self.workspace = workspace
        self.memory = memory
        self.token_ids = token_ids

    def __len__(self) -> int:
        return self.memory.length

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, by the model's configuration."""
        return self.workspace.model.stop_ids

    @property
    def next_logits(self) -> np.ndarray:
        """f32[V]: the logits of the token after all tokens fed.

        Raises:
            InvalidRequest: no token was fed since the session was made, restored or, without a
                checkpoint, rewound.
        """
        mark = self.memory.marks.get(self.memory.length)
        if mark is None or mark.logits is None:
            raise InvalidRequest(
                "the logits of the next token are not known here; feed a token first"
            )
        return np.asarray(mark.logits)[mark.index]

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """Feeds tokens, in as few steps as they fit. Returns `next_logits`."""
        for _ in self._feed(token_ids, Returns(logits="last")):
            pass
        return self.next_logits

    def decode(self, token_id: int) -> np.ndarray:
        """Feeds one token by a decode step. Returns `next_logits`.

        `Workspace.decode` does so for many sessions in one step.
        """
        return self.workspace.decode([self], [token_id])[0]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Feeds tokens as `prefill` does. Returns f32[tokens, V]: the logits after each of them."""
        parts = [
            np.asarray(output.logits)[:count]
            for count, output in self._feed(token_ids, Returns(logits="all"))
        ]
        return np.concatenate(parts)

    def hidden_states(self, token_ids: Sequence[int], layers: Sequence[int]) -> np.ndarray:
        """Feeds tokens as `prefill` does. Returns their hidden states [layers, tokens, D].

        Layer n stands for what n layers have made of the embeddings, before any final norm: 0 are
        the embeddings themselves. Each tuple of layers compiles steps of its own.
        """
        most = len(self.workspace.model_config.layers)
        wrong = [n for n in layers if not 0 <= n <= most]
        if wrong or not layers:
            raise InvalidRequest(f"layers must lie in [0, {most}], got {shown(list(layers))}")
        parts = [
            np.stack([np.asarray(hidden)[:count] for hidden in output.hidden])
            for count, output in self._feed(token_ids, Returns("last", tuple(layers)))
        ]
        return np.concatenate(parts, axis=1)

    def verify(self, token_ids: Sequence[int]) -> np.ndarray:
        """Feeds tokens that can be taken back: see `Workspace.verify`. Returns f32[tokens, V]."""
        return self.workspace.verify([self], [token_ids])[0]

    def fork(self, count: int) -> list["Session"]:
        """So many sessions with the same past. They share its memory and write to none of it."""
        return [self.workspace.fork(self) for _ in range(count)]

    def checkpoint(self) -> None:
        """Keeps what is needed to `rewind` to the present length, until it is rewound past.

        Takes one state slot per group of linear layers, and copies nothing.
        """
        self.memory.checkpoints.add(self.memory.length)

    def forget_checkpoints(self) -> None:
        """Gives up all checkpoints; their slots are free from the next step on."""
        self.memory.checkpoints.clear()

    def rewind(self, count: int) -> None:
        """Takes the last `count` tokens back.

        Full attention can go back anywhere. A linear layer can go back where there is a state: at
        a checkpoint, within the last `verify`, or to the very beginning; a window layer where its
        window's pages have not been given back.

        Raises:
            InvalidRequest: there are fewer tokens.
            CannotRewind: a layer cannot go back there; the message says where it can.
        """
        length = self.memory.length - count
        if count < 0 or length < 0:
            raise InvalidRequest(f"cannot take {count} of {self.memory.length} tokens back")
        self.workspace.memory.rewind(self.memory, length)
        del self.token_ids[length:]

    def snapshot(self) -> Snapshot:
        """Copies all that is remembered to the host; `Workspace.restore` goes on from it.

        Raises:
            SnapshotError: nothing was fed yet.
        """
        if not self.token_ids:
            raise SnapshotError("the session has computed nothing; feed tokens before a snapshot")
        runner, pools = self.workspace.runner, self.workspace.memory
        arrays: dict[str, np.ndarray] = {}
        for group in range(len(runner.groups)):
            arrays |= runner.read(group, self._ids(group))
        return Snapshot(
            tuple(self.token_ids), len(self), runner.fingerprint, pools.page_size, arrays
        )

    def state(self, layer: int) -> dict[str, np.ndarray]:
        """A copy of a linear layer's state: conv [W - 1, channels] and recurrent [Hv, dk, dv].

        Raises:
            InvalidRequest: the layer has no state, or nothing was fed yet.
        """
        group = self._group(layer, state=True)
        prefix = f"{layer}."
        return {
            name.removeprefix(prefix): array[0]
            for name, array in self.workspace.runner.read(group, self._ids(group)).items()
            if name.startswith(prefix)
        }

    def set_state(self, layer: int, **arrays: np.ndarray) -> None:
        """Puts arrays of `state` back, edited; tokens fed from now on see them.

        Forks keep the state they had.

        Raises:
            InvalidRequest: as `state` does, or an array has a wrong name or shape.
        """
        current = self.state(layer)
        for name, array in arrays.items():
            if name not in current or np.shape(array) != current[name].shape:
                expected = {key: value.shape for key, value in current.items()}
                raise InvalidRequest(
                    f"{name} {np.shape(array)} is no state of layer {layer}, which has {expected}"
                )
        edits = {
            f"{layer}.{name}": np.asarray(array, current[name].dtype)[None]
            for name, array in arrays.items()
        }
        self._write(self._group(layer, state=True), edits)

    def kv(self, layer: int) -> KV:
        """A copy of the keys and values that an attention layer can still see.

        Raises:
            InvalidRequest: the layer has no keys and values, or nothing was fed yet.
        """
        group = self._group(layer, state=False)
        pages = self.workspace.runner.read(group, self._ids(group))[f"{layer}.pages"]
        first, start, length = self._seen(group)
        flat = pages.reshape(-1, *pages.shape[2:])[start - first : length - first]
        if flat.dtype not in LARGEST:
            return KV(start, flat[:, 0::2].copy(), flat[:, 1::2].copy())
        scales = self._scales(layer, flat.dtype)
        return KV(start, *(flat[:, i::2].astype(np.float32) * scales[i] for i in range(2)))

    def set_kv(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Puts `kv` back, edited: the same positions; tokens fed from now on see them.

        Forks keep what they had. Pages of bytes round them.

        Raises:
            InvalidRequest: as `kv` does, or a shape is another one.
        """
        current = self.kv(layer)
        if np.shape(keys) != current.keys.shape or np.shape(values) != current.values.shape:
            raise InvalidRequest(
                f"keys and values of layer {layer} are {current.keys.shape} each, got "
                f"{np.shape(keys)} and {np.shape(values)}"
            )
        group, name = self._group(layer, state=False), f"{layer}.pages"
        pages = self.workspace.runner.read(group, self._ids(group))[name]
        first, start, length = self._seen(group)
        flat = pages.reshape(-1, *pages.shape[2:])  # a view
        for i, edited in enumerate((keys, values)):
            if flat.dtype in LARGEST:
                scaled = np.asarray(edited, np.float32) / self._scales(layer, flat.dtype)[i]
                edited = np.asarray(encode(jnp.asarray(scaled), flat.dtype))
            flat[start - first : length - first, i::2] = edited
        self._write(group, {name: pages})

    def _feed(self, token_ids: Sequence[int], returns: Returns) -> Iterator[tuple[int, StepOutput]]:
        """Prefill chunks and what their steps return.

        Chunks end on the grid of the linear kernels' blocks, as those of the engine do.
        """
        config = self.workspace.config
        if not len(token_ids):
            raise InvalidRequest("no tokens were given; give at least one")
        if len(self) + len(token_ids) > config.max_model_len:
            raise InvalidRequest(
                f"{len(self)} tokens and {len(token_ids)} more are longer than max_model_len "
                f"{config.max_model_len}; raise it"
            )
        rest = list(token_ids)
        while rest:
            end = len(self) + min(len(rest), config.max_num_batched_tokens)
            aligned = end - end % config.prefill_alignment
            if end < len(self) + len(rest) and aligned > len(self):
                end = aligned
            count = end - len(self)
            chunk, rest = rest[:count], rest[count:]
            yield count, self.workspace.run([self], [chunk], StepKind.MIXED, returns)

    def _group(self, layer: int, *, state: bool) -> int:
        """The cache group of a layer, which must have a state or else keys and values."""
        for index, group in enumerate(self.workspace.runner.groups):
            if layer in group.layers and (index in self.workspace.memory.states) == state:
                if not self.token_ids:
                    raise InvalidRequest("the session remembers nothing yet; feed tokens first")
                return index
        kinds = [spec.kind for spec in self.workspace.model_config.layers]
        what = "state" if state else "keys and values"
        raise InvalidRequest(f"layer {shown(layer)} has no {what}; the layers are {kinds}")

    def _scales(self, layer: int, dtype: np.dtype) -> list[np.ndarray]:
        """Of keys and of values in pages of `dtype`: f32[K, 1]."""
        mixer = self.workspace.model_config.layers[layer].mixer
        assert isinstance(mixer, AttentionSpec)
        ones = np.ones(mixer.num_kv_heads, np.float32)
        return [(ones if s is None else s)[:, None] for s in kv_scales(mixer, dtype)]

    def _ids(self, group: int) -> list[int]:
        """The pages that the next token sees, in order, or the slot."""
        pools = self.workspace.memory
        if group in pools.states:
            return [self.memory.marks[self.memory.length].slots[group]]
        return list(pools.live_pages(self.memory, group, self.memory.length).values())

    def _seen(self, group: int) -> tuple[int, int, int]:
        """Positions: of the first token of the live pages, and of those the next token sees."""
        pools = self.workspace.memory
        spec, length = pools.paged[group], self.memory.length
        start = max(0, length - spec.window + 1) if isinstance(spec, WindowSpec) else 0
        return start - start % pools.page_size, start, length

    def _write(self, group: int, edits: dict[str, np.ndarray]) -> None:
        """Replaces some layers' arrays of what `_ids` names, in pages or slots of its own."""
        workspace = self.workspace
        arrays = workspace.runner.read(group, self._ids(group)) | edits
        old, new = workspace.memory.own(self.memory, group)
        if group in workspace.memory.paged:
            workspace.runner.copy(group, old, new)  # also pages that the window has left
        owner = self.memory.marks[self.memory.length].owner
        workspace.runner.write(group, self._ids(group), arrays, owner)
