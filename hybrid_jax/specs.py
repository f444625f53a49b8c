"""What a layer is and what it must remember, as frozen values without arrays.

Everything below the model families sees a layer only through these specs: no model name and no
layer-type string is compared anywhere else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class NormSpec:
    """An RMS norm.

    `kind`: `rms` casts to the activation dtype before the weight; `rms32` multiplies the weight in
    float32 and casts after; `rms1p` is rms32 with weight `1 + w`.
    """

    kind: Literal["rms", "rms32", "rms1p"]
    eps: float


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding table (half-split pairs), over the first `dim` channels of a head.

    `kind` and the numbers below it follow the `rope_parameters` of config.json: `default`,
    `linear` (positions divided by `factor`), `llama3` or `yarn`.
    """

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention over the whole context (`window` None) or over a sliding window.

    `window` W includes the token itself: token q sees positions p with q - W < p <= q.
    `qk_norm_width` says whether q/k norms run per head or over the whole projection.
    `k_range` and `v_range` are the largest |K| and |V| of each KV head, if known: what pages of
    float8 or int8 are scaled to hold.
    `output_gate`: q_proj is twice as wide, per head [q | gate]; out * sigmoid(gate) before o_proj.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_width: Literal["head", "projection"] = "head"
    qkv_bias: bool = False
    out_bias: bool = False
    k_range: tuple[float, ...] | None = None
    v_range: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            _positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads are no multiple of {self.num_kv_heads} KV heads"
            )
        if self.window is not None:
            _positive("sliding_window", self.window)
        if self.rope is not None and (self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim):
            raise ValueError(
                f"rope over {self.rope.dim} channels of a head of {self.head_dim}, not an even "
                "number of them"
            )


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated delta net: causal convolution, then the gated delta rule with one decay per value head.

    Each key head serves `num_v_heads // num_k_heads` consecutive value heads. `allow_neg_eigval`
    doubles beta (Grazzi et al. 2024). The output norm is RMS over `v_dim` with a plain weight,
    multiplied by silu(z).
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    norm_eps: float
    allow_neg_eigval: bool = False

    def __post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "conv_width"):
            _positive(name, getattr(self, name))
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"{self.num_v_heads} value heads are no multiple of {self.num_k_heads} key heads"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all of q, k and v, in this order."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


MixerSpec = AttentionSpec | GatedDeltaSpec


@dataclass(frozen=True)
class MLPSpec:
    """down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        _positive("intermediate_size", self.intermediate_size)


@dataclass(frozen=True)
class MoESpec:
    """Softmax over all experts, top-k, optionally renormalised; plus an optional shared expert.

    `shared_gate`: the shared expert's output is multiplied by sigmoid(shared_gate(x)).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: Activation = "silu"
    renormalize: bool = True
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "intermediate_size"):
            _positive(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(f"{self.top_k} experts per token of only {self.num_experts}")


FFNSpec = MLPSpec | MoESpec


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    `layout`: `pre` x += f(norm x); `post` x += norm(f x), no input norm; `sandwich` both.
    """

    mixer: MixerSpec
    ffn: FFNSpec
    norm: NormSpec
    layout: Literal["pre", "post", "sandwich"] = "pre"

    @property
    def kind(self) -> Literal["full", "window", "linear"]:
        """The class of cache that the mixer needs; the word that users see."""
        if isinstance(self.mixer, GatedDeltaSpec):
            return "linear"
        return "full" if self.mixer.window is None else "window"


@dataclass(frozen=True)
class PagedSpec:
    """K/V pages that grow with the sequence."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer, without padding."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize(self.dtype)


@dataclass(frozen=True)
class WindowSpec(PagedSpec):
    """K/V pages of which only the last `window` tokens are kept."""

    window: int


@dataclass(frozen=True)
class StateArray:
    """One named array of a state row, without the leading slot axis."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one row, without padding."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class StateSpec:
    """A fixed number of bytes per sequence, overwritten in place."""

    arrays: tuple[StateArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one slot in one layer, without padding."""
        return sum(a.nbytes for a in self.arrays)


CacheSpec = PagedSpec | WindowSpec | StateSpec


@dataclass(frozen=True)
class CacheGroup:
    """Layers with equal cache specs: one pool and one table, but each its own arrays."""

    spec: CacheSpec
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """Kind and shape of what a layer remembers, in words for people."""
        spec = self.spec
        if isinstance(spec, StateSpec):
            shape = " x ".join(map(str, spec.arrays[-1].shape))
            return f"linear {shape}"
        heads = f"{spec.num_kv_heads} x {spec.head_dim}"
        return (
            f"window {spec.window:,}, {heads}" if isinstance(spec, WindowSpec) else f"full {heads}"
        )


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a positive integer")


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype given by name."""
    return {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}[dtype]


def cache_spec(
    mixer: MixerSpec, *, kv_dtype: str, conv_dtype: str, state_dtype: str = "float32"
) -> CacheSpec:
    """What `mixer` must remember. Its recurrent state does not follow the activations' dtype."""
    if isinstance(mixer, GatedDeltaSpec):
        return StateSpec(
            (
                StateArray("conv", (mixer.conv_width - 1, mixer.conv_channels), conv_dtype),
                StateArray("recurrent", (mixer.num_v_heads, mixer.k_dim, mixer.v_dim), state_dtype),
            )
        )
    if mixer.window is None:
        return PagedSpec(mixer.num_kv_heads, mixer.head_dim, kv_dtype)
    return WindowSpec(mixer.num_kv_heads, mixer.head_dim, kv_dtype, mixer.window)


def cache_groups(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Groups layers (one spec each, in layer order) by equal spec, in order of first appearance."""
    layers: dict[CacheSpec, list[int]] = {}
    for i, spec in enumerate(specs):
        layers.setdefault(spec, []).append(i)
    return tuple(CacheGroup(spec, tuple(ids)) for spec, ids in layers.items())
