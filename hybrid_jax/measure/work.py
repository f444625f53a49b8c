"""What a step has to do, by formula: floating-point operations, and bytes it must move once."""

import math
from collections import defaultdict
from typing import NamedTuple

from hybrid_jax.config import ModelConfig
from hybrid_jax.measure.scopes import Place
from hybrid_jax.models.decoder import abstract_params
from hybrid_jax.specs import AttentionSpec, MixerSpec, MoESpec, itemsize


class Work(NamedTuple):
    """Floating-point operations and bytes."""

    flops: float
    nbytes: float

    def __add__(self, other: object) -> "Work":
        """Of both."""
        assert isinstance(other, Work)
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)


def step_work(
    model: ModelConfig, dtype: str, *, rows: int, earlier: int, new: int
) -> dict[Place, Work]:
    """The work of a step in which every row has `new` tokens after `earlier` ones.

    Counted are products with weights, attention over what is visible, the recurrence in its
    token-by-token form, and the convolution; weights, keys, values and states are read once, and
    written where they change. Norms, rope and sampling count nothing. An expert is read once if any
    token may have chosen it.

    Args:
        model: the model. dtype: of weights, keys, values and convolution inputs.
    """
    tokens, size = rows * new, itemsize(dtype)
    work: dict[Place, Work] = defaultdict(lambda: Work(0.0, 0.0))
    _, shapes, _ = abstract_params(model, dtype)
    for path, shape in shapes.items():
        _, index, part, *rest = [*path.split("."), "", ""]
        if not path.startswith("layers.") or len(shape.shape) < 2 or rest[0] == "conv_weight":
            continue
        layer = model.layers[int(index)]
        count, flops, nbytes = math.prod(shape.shape), 1.0, 1.0
        if isinstance(layer.ffn, MoESpec) and rest[0] in ("gate_up", "down"):
            flops = layer.ffn.top_k / layer.ffn.num_experts
            nbytes = min(1.0, tokens * flops)
        work[Place(int(index), layer.kind, part)] += Work(
            2.0 * tokens * count * flops, size * count * nbytes
        )
    for i, layer in enumerate(model.layers):
        for op, done in _mixer_work(layer.mixer, size, rows, earlier, new).items():
            work[Place(i, layer.kind, op)] += done
    table = model.vocab_size * model.hidden_size
    work[Place(None, "head", "head")] = Work(2.0 * rows * table, float(size * table))
    work[Place(None, "embed", "embed")] = Work(0.0, float(size * tokens * model.hidden_size))
    return dict(work)


def _mixer_work(mixer: MixerSpec, size: int, rows: int, earlier: int, new: int) -> dict[str, Work]:
    """Of the ops of one layer."""
    if isinstance(mixer, AttentionSpec):
        window = mixer.window or earlier + new
        pairs = sum(min(window, earlier + i + 1) for i in range(new))  # of a query and a key
        token_bytes = 2 * mixer.num_kv_heads * mixer.head_dim * size
        read = min(earlier + new, window + new - 1)
        flops = 4.0 * mixer.num_heads * mixer.head_dim * pairs
        return {"paged_attention": Work(rows * flops, float(rows * token_bytes * (read + new)))}
    state = mixer.num_v_heads * mixer.k_dim * mixer.v_dim
    channels, width = mixer.conv_channels, mixer.conv_width
    # Per token and element: decay, and a multiply-add each to read, to update and to put out.
    rule = Work(7.0 * rows * new * state, 2.0 * 4 * rows * state)
    tail = Work(2.0 * rows * new * width * channels, 2.0 * size * rows * (width - 1) * channels)
    return {"gated_delta_net": rule + tail}
