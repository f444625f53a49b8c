"""Choosing the next token of every row: one traced function for all requests.

Order, following vLLM's sampler:

1.  log probabilities: log-softmax of the unmodified logits (vLLM's `raw_logprobs`), so they
    describe the model and not the request's settings;
2.  logit bias, and stop tokens barred before `min_tokens`;
3.  user logits processors, in the order of the engine's list, on the rows that asked;
4.  penalties: repetition, then frequency, then presence;
5.  temperature (0: take the argmax here), min-p, top-k, top-p, draw.

Min-p, top-k and top-p each keep every token from some logit upwards. So they are three thresholds,
found without sorting, and ties at a threshold are all kept: top-k keeps more than k tokens when
the k-th largest logit is not unique. Top-p keeps the smallest such set whose share of the mass
left by min-p and top-k is at least p, and always at least one token.

What no row asks for is skipped at run time by `lax.cond`; a greedy batch costs one argmax.
Dimension letters: S batch rows, R persistent rows, V vocabulary, L max_model_len, B bias entries,
E stop tokens, A blocks, K reported log probabilities.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hybrid_jax.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

_BLOCK = 512  # logits per block of a two-level reduction: the fastest of 64 to 2,048 on XLA:CPU
_CANDIDATE_BLOCK = 128
_CANDIDATE_BLOCKS = 256  # any kept set of up to this many tokens is found without a full search
_MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 16  # the request's and the model's
_INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsContext:
    """What a user logits processor may look at. `history` beyond `seq_lens` is garbage."""

    history: jax.Array  # i32[S, L] token at each position, prompt and output
    seq_lens: jax.Array  # i32[S] valid tokens of `history`
    prompt_lens: jax.Array  # i32[S] how many of them are the prompt


LogitsProcessor = Callable[[jax.Array, LogitsContext], jax.Array]


class Sampled(NamedTuple):
    """The result of `sample`."""

    tokens: jax.Array  # i32[S]
    logprob: jax.Array  # f32[S] of the sampled token; 0 when no row asked
    top_ids: jax.Array  # i32[S, K] most likely first; -1 where the vocabulary has fewer
    top_logprobs: jax.Array  # f32[S, K]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingTable:
    """The sampling parameters of every persistent row, as arrays. Row 0, the null row: greedy."""

    temperature: jax.Array  # f32[R]; 0: greedy
    top_k: jax.Array  # i32[R]; 0: off
    top_p: jax.Array  # f32[R]; 1: off
    min_p: jax.Array  # f32[R]; 0: off
    repetition: jax.Array  # f32[R]; 1: off
    presence: jax.Array  # f32[R]; 0: off
    frequency: jax.Array  # f32[R]; 0: off
    seed: jax.Array  # u32[R]
    prompt_len: jax.Array  # i32[R]
    num_logprobs: jax.Array  # i32[R]; -1: none
    bias_ids: jax.Array  # i32[R, B]; -1: unused
    bias_values: jax.Array  # f32[R, B]
    min_len: jax.Array  # i32[R]; stop_ids are barred while the row is shorter than this
    stop_ids: jax.Array  # i32[R, E]; -1: unused
    processors: jax.Array  # bool[R, processors]


class SamplingRows:
    """The host's twin of `SamplingTable`: set and clear rows here, then take `.device()`.

    Args:
        max_num_seqs: rows besides the null row.
        max_logit_bias: B, the most biased tokens of a request.
        processors: names of the logits processors, in the order of the functions given to
            `sample`.
        sharding: where `.device()` puts the table; None: JAX's default device.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        max_logit_bias: int = 300,
        processors: tuple[str, ...] = (),
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        self.processors = processors
        self._sharding = sharding
        rows = max_num_seqs + 1
        self._host = {
            "temperature": np.zeros(rows, np.float32),
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.ones(rows, np.float32),
            "min_p": np.zeros(rows, np.float32),
            "repetition": np.ones(rows, np.float32),
            "presence": np.zeros(rows, np.float32),
            "frequency": np.zeros(rows, np.float32),
            "seed": np.zeros(rows, np.uint32),
            "prompt_len": np.zeros(rows, np.int32),
            "num_logprobs": np.full(rows, -1, np.int32),
            "bias_ids": np.full((rows, max_logit_bias), -1, np.int32),
            "bias_values": np.zeros((rows, max_logit_bias), np.float32),
            "min_len": np.zeros(rows, np.int32),
            "stop_ids": np.full((rows, _MAX_STOP_IDS), -1, np.int32),
            "processors": np.zeros((rows, len(processors)), np.bool_),
        }
        self._neutral = {name: array[0].copy() for name, array in self._host.items()}
        self._table: SamplingTable | None = None

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_len: int,
        *,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Gives `row` to a sequence.

        Args:
            row: persistent row, at least 1.
            params: the request's parameters.
            seed: the sequence's seed (`params.seed` or the engine's choice); low 32 bits count.
            prompt_len: tokens of the original prompt, also after a preemption.
            stop_ids: tokens that end the sequence, barred until `params.min_tokens` are out.

        Raises:
            ValueError: the row is the null row, there are more biases or stop ids than the table
                holds, or a processor's name is unknown.
        """
        if not 1 <= row < len(self._host["top_k"]):
            raise ValueError(f"row must be in [1, {len(self._host['top_k'])}), got {row}")
        unknown = [name for name in params.logits_processors if name not in self.processors]
        if unknown:
            raise ValueError(
                f"logits_processors has the unknown name {unknown[0]!r}; registered with the "
                f"engine: {', '.join(self.processors) or 'none'}"
            )
        values: dict[str, object] = {
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_k": min(max(params.top_k, 0), _INT32_MAX),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "seed": seed % 2**32,
            "prompt_len": prompt_len,
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
            "bias_ids": self._padded("bias_ids", "logit_bias", params.logit_bias.keys()),
            "bias_values": self._padded("bias_values", "logit_bias", params.logit_bias.values()),
            "min_len": prompt_len + params.min_tokens if params.min_tokens else 0,
            "stop_ids": self._padded("stop_ids", "stop_ids", stop_ids),
            "processors": [name in params.logits_processors for name in self.processors],
        }
        for name, value in values.items():
            self._host[name][row] = value
        self._table = None

    def clear_row(self, row: int) -> None:
        """Makes `row` neutral again: greedy, nothing else."""
        for name, array in self._host.items():
            array[row] = self._neutral[name]
        self._table = None

    def device(self) -> SamplingTable:
        """The rows on the device; uploaded only when a row changed since the last call."""
        if self._table is None:
            # Copies: on CPU, device arrays may share memory with the numpy arrays they come from,
            # and a step still in flight must not see the next step's rows.
            copies = SamplingTable(**{name: array.copy() for name, array in self._host.items()})  # type: ignore[arg-type]
            self._table = jax.device_put(copies, self._sharding)
        return self._table

    def _padded(self, column: str, field: str, values: Iterable[float]) -> np.ndarray:
        given = list(values)
        padded = self._neutral[column].copy()
        if len(given) > len(padded):
            raise ValueError(
                f"{field} must have at most {len(padded)} entries, got {len(given)}; send fewer"
            )
        padded[: len(given)] = given
        return padded


def sample(
    logits: jax.Array,
    table: SamplingTable,
    row_ids: jax.Array,
    seq_lens: jax.Array,
    history: jax.Array,
    *,
    max_logprobs: int,
    processors: tuple[LogitsProcessor, ...] = (),
) -> Sampled:
    """Draws one token for every row.

    The draw of a row depends on its logits, its parameters and `fold_in(key(seed), seq_len)`,
    never on its place in the batch or on its batch mates. A seed gives the same tokens only
    within one version of this module.

    Args:
        logits: f32[S, V]; a row with NaN gets some valid token id. Rows must not be all -inf.
        table: parameters of the persistent rows.
        row_ids: i32[S] persistent row of each batch row; 0 for padding.
        seq_lens: i32[S] tokens the row has so far: the new token's position.
        history: i32[R, L] tokens of the persistent rows; garbage from `seq_lens` on.
        max_logprobs: K, the most alternatives reported.
        processors: the functions behind the columns of `table.processors`. Pure JAX; each maps
            (f32[S, V], LogitsContext) to f32[S, V].

    Raises:
        ValueError: `processors` does not fit the table.
    """
    if table.processors.shape[1] != len(processors):
        raise ValueError(
            f"the table was made for {table.processors.shape[1]} logits processors, "
            f"got {len(processors)}; name the same ones to SamplingRows"
        )
    logits = logits.astype(jnp.float32)
    rows = jax.tree.map(lambda array: array[row_ids], table)
    adjusts = jnp.any(_biased(rows, seq_lens)) | jnp.any(_penalised(rows)) | rows.processors.any()
    # _choose stands in both branches, rather than after a cond that returns logits: passing
    # [S, V] through an identity branch would copy it in every greedy step.
    tokens = lax.cond(
        adjusts,
        lambda: _choose(
            _adjust(logits, rows, seq_lens, history, row_ids, processors), rows, seq_lens
        ),
        lambda: _choose(logits, rows, seq_lens),
    )
    num_rows = logits.shape[0]
    logprob, top_ids, top_logprobs = lax.cond(
        jnp.any(rows.num_logprobs >= 0),
        lambda: _logprobs(logits, tokens, max_logprobs),
        lambda: (
            jnp.zeros(num_rows, jnp.float32),
            jnp.full((num_rows, max_logprobs), -1, jnp.int32),
            jnp.zeros((num_rows, max_logprobs), jnp.float32),
        ),
    )
    return Sampled(tokens, logprob, top_ids, top_logprobs)


def _biased(rows: SamplingTable, seq_lens: jax.Array) -> jax.Array:
    """bool[S]: the row adds a bias or bars its stop tokens in this step."""
    barred = (seq_lens < rows.min_len) & (rows.stop_ids >= 0).any(axis=1)
    return barred | (rows.bias_ids >= 0).any(axis=1)


def _penalised(rows: SamplingTable) -> jax.Array:
    """bool[S]: the row uses any of the three penalties."""
    return (rows.repetition != 1.0) | (rows.presence != 0.0) | (rows.frequency != 0.0)


def _adjust(
    logits: jax.Array,
    rows: SamplingTable,
    seq_lens: jax.Array,
    history: jax.Array,
    row_ids: jax.Array,
    processors: tuple[LogitsProcessor, ...],
) -> jax.Array:
    """f32[S, V] logits after everything that can change the most likely token."""
    context = LogitsContext(history[row_ids], seq_lens, rows.prompt_len)
    logits = lax.cond(
        jnp.any(_biased(rows, seq_lens)),
        lambda x: _add_bias(x, rows, seq_lens),
        lambda x: x,
        logits,
    )
    for index, processor in enumerate(processors):
        asks = rows.processors[:, index]

        def apply(
            x: jax.Array, processor: LogitsProcessor = processor, asks: jax.Array = asks
        ) -> jax.Array:
            return jnp.where(asks[:, None], processor(x, context), x)

        logits = lax.cond(jnp.any(asks), apply, lambda x: x, logits)
    return lax.cond(
        jnp.any(_penalised(rows)),
        lambda x: _penalise(x, rows, context),
        lambda x: x,
        logits,
    )


def _add_bias(logits: jax.Array, rows: SamplingTable, seq_lens: jax.Array) -> jax.Array:
    """Adds the biases, and -inf to stop tokens while `seq_lens < min_len`."""
    barred = (seq_lens < rows.min_len)[:, None] & (rows.stop_ids >= 0)
    ids = jnp.concatenate([rows.bias_ids, jnp.where(barred, rows.stop_ids, -1)], axis=1)
    values = jnp.concatenate([rows.bias_values, jnp.where(barred, -jnp.inf, 0.0)], axis=1)
    # A negative index would count from the end; one past the end is dropped.
    ids = jnp.where(ids < 0, logits.shape[1], ids)
    index = jnp.broadcast_to(jnp.arange(ids.shape[0])[:, None], ids.shape)
    return logits.at[index, ids].add(values, mode="drop")


def _penalise(logits: jax.Array, rows: SamplingTable, context: LogitsContext) -> jax.Array:
    """Repetition, frequency and presence penalties.

    Repetition (CTRL, arXiv:1909.05858, in the form of Hugging Face's
    RepetitionPenaltyLogitsProcessor): logits of prompt and output tokens are divided by the
    penalty when positive, else multiplied. Frequency and presence (OpenAI API reference): minus
    count * frequency, minus presence if count > 0, over output tokens only.
    """
    history, vocab = context.history, logits.shape[1]
    position = jnp.arange(history.shape[1])[None, :]
    valid = position < context.seq_lens[:, None]
    output = valid & (position >= context.prompt_lens[:, None])
    index = jnp.broadcast_to(jnp.arange(history.shape[0])[:, None], history.shape)
    zeros = jnp.zeros(logits.shape, jnp.int32)

    def count(mask: jax.Array) -> jax.Array:
        return zeros.at[index, jnp.where(mask, history, vocab)].add(1, mode="drop")

    repetition = rows.repetition[:, None]
    scaled = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = jnp.where((count(valid) > 0) & (repetition != 1.0), scaled, logits)
    counts = count(output)
    logits = logits - rows.frequency[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(counts > 0, rows.presence[:, None], 0.0)


def _choose(logits: jax.Array, rows: SamplingTable, seq_lens: jax.Array) -> jax.Array:
    """i32[S]: the argmax of greedy rows, a draw for the others."""
    return lax.cond(
        jnp.any(rows.temperature > 0.0),
        lambda: jnp.where(rows.temperature > 0.0, _random(logits, rows, seq_lens), argmax(logits)),
        lambda: argmax(logits),
    )


def _random(logits: jax.Array, rows: SamplingTable, seq_lens: jax.Array) -> jax.Array:
    """i32[S]: temperature, min-p, top-k, top-p, draw. Greedy rows get anything."""
    random = rows.temperature > 0.0
    temperature = jnp.where(random, rows.temperature, 1.0)
    top_k = jnp.where(random, rows.top_k, 0)
    top_p = jnp.where(random, rows.top_p, 1.0)

    def weigh() -> jax.Array:
        # Relative to the maximum before dividing: a small temperature cannot overflow, and the
        # largest weight is exactly 1, so min-p compares with the weights as they are.
        highest = logits.max(axis=1, keepdims=True)
        return jnp.exp((logits - highest) / temperature[:, None])

    def filtered() -> jax.Array:
        weights = weigh()
        kept = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
        cut = _cutoff(logits, kept, top_k, top_p)
        return _draw(jnp.where(logits >= cut[:, None], kept, 0.0), rows.seed, seq_lens)

    filters = (top_k > 0) | (top_p < 1.0) | (random & (rows.min_p > 0.0))
    return lax.cond(jnp.any(filters), filtered, lambda: _draw(weigh(), rows.seed, seq_lens))


def _draw(weights: jax.Array, seed: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """i32[S]: an exact draw proportional to `weights` f32[S, V], by Gumbel-max in two levels.

    argmax(log w + Gumbel noise) is distributed as w (Maddison et al., arXiv:1411.0030). First a
    block is drawn by its total weight, then a token of the block by its own. That needs
    A + V / A random numbers per row instead of V, whose generation took 100 ms at S 16,
    V 262,144 on two CPU cores, longer than a small model's whole step.
    """
    blocks = _blocks(weights, _BLOCK, 0.0)
    num_blocks, size = blocks.shape[1:]

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (num_blocks + size,), jnp.float32)

    gumbel = jax.vmap(noise)(seed, seq_lens)
    block = jnp.argmax(jnp.log(blocks.sum(axis=2)) + gumbel[:, :num_blocks], axis=1)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * size + jnp.argmax(jnp.log(inner) + gumbel[:, num_blocks:], axis=1)
    # The padding of the last block has weight 0; only NaN could select it.
    return jnp.minimum(token, weights.shape[1] - 1).astype(jnp.int32)


def argmax(x: jax.Array) -> jax.Array:
    """i32[S]: index of the largest of x f32[S, V] per row; the lowest on ties, as `jnp.argmax`.

    Two levels, because XLA:CPU vectorises a maximum but not an argmax: at S 16, V 262,144 the
    one-level form took 30 to 40 ms, this one 0.3 ms. NaN counts as the largest value.
    """
    blocks = _blocks(x, _BLOCK, -jnp.inf)
    block = jnp.argmax(blocks.max(axis=2), axis=1)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * blocks.shape[2] + jnp.argmax(inner, axis=1)).astype(jnp.int32)


def _blocks(x: jax.Array, most: int, fill: float) -> jax.Array:
    """x f32[S, V] as f32[S, A, size], padded with `fill` if no size of 64 to `most` divides V."""
    vocab = x.shape[1]
    size = most
    while size > 64 and vocab % size:
        size //= 2
    if vocab % size:
        size = most
        x = jnp.pad(x, ((0, 0), (0, -vocab % size)), constant_values=fill)
    return x.reshape(x.shape[0], -1, size)


class _Candidates(NamedTuple):
    """The blocks of a row that hold its largest values."""

    values: jax.Array  # f32[S, count * size], in the order of their indices
    blocks: jax.Array  # i32[S, count] ascending
    bound: jax.Array  # f32[S] no value outside is larger


def _candidates(blocks: jax.Array, count: int) -> _Candidates:
    """The `count` < A blocks of f32[S, A, size] with the largest maxima.

    They hold the `count` largest values: each value outside is preceded by the maxima of all
    of them. On ties lower indices come first, here and there.
    """
    # The barrier keeps XLA from moving the slices below into top_k, which would turn it into a
    # full sort: 8 ms in place of 1 ms at S 16, V 262,144 on CPU.
    maxima, order = lax.optimization_barrier(lax.top_k(blocks.max(axis=2), count + 1))
    # Ascending, so that a value's place among the candidates still breaks ties by its index.
    chosen = jnp.sort(order[:, :count], axis=1)
    values = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    return _Candidates(values.reshape(values.shape[0], -1), chosen, maxima[:, count])


def _cutoff(logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """f32[S]: the smallest logit that top-k and top-p keep; -inf when both are off.

    Args:
        logits: f32[S, V].
        weights: f32[S, V] ascending with the logits; 0 where min-p removed the token.
        top_k: i32[S]; 0: off.
        top_p: f32[S]; 1: off.

    The search reads its data about 30 times, so it looks at the candidate blocks only, which
    is enough unless a kept set is large and scattered; then everything is searched.
    """

    def total(cut: jax.Array) -> jax.Array:
        return _mass(logits, weights, cut)

    def full() -> jax.Array:
        bound = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
        return _search(logits, weights, bound, top_k, top_p, total)

    blocks = _blocks(logits, _CANDIDATE_BLOCK, -jnp.inf)
    if blocks.shape[1] <= _CANDIDATE_BLOCKS:
        return full()
    found = _candidates(blocks, _CANDIDATE_BLOCKS)
    near = jnp.take_along_axis(
        _blocks(weights, _CANDIDATE_BLOCK, 0.0), found.blocks[:, :, None], axis=1
    ).reshape(found.values.shape)
    cut = _search(found.values, near, found.bound, top_k, top_p, total)
    # A top-p cut at the bound may mean that tokens outside were missed. A top-k cut may lie
    # there by ties, but is right: the candidates hold the _CANDIDATE_BLOCKS largest logits.
    enough = (top_k <= _CANDIDATE_BLOCKS) & ((top_p >= 1.0) | (cut > found.bound))
    return lax.cond(jnp.all(enough), lambda: cut, full)


def _search(
    logits: jax.Array,
    weights: jax.Array,
    bound: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    total: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """f32[S]: the top-k and top-p cut among `logits`, at least `bound` where either is on."""

    def count(cut: jax.Array) -> jax.Array:
        return jnp.sum(logits >= cut[:, None], axis=1, dtype=jnp.int32)

    high = logits.max(axis=1)
    by_count = _bisect(count, top_k, bound, high, top_k > 0)
    by_mass = _bisect(
        # The cut by count is applied first: tokens below it have no mass.
        lambda cut: _mass(logits, weights, jnp.maximum(cut, by_count)),
        top_p * total(by_count),
        bound,
        high,
        top_p < 1.0,
    )
    return jnp.maximum(by_count, by_mass)


def _mass(logits: jax.Array, weights: jax.Array, cut: jax.Array) -> jax.Array:
    """f32[S]: the weight of all logits from `cut` upwards."""
    return jnp.sum(jnp.where(logits >= cut[:, None], weights, 0.0), axis=1)


def _bisect(
    measure: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    low: jax.Array,
    high: jax.Array,
    wanted: jax.Array,
) -> jax.Array:
    """f32[S]: the largest cut in [low, high] with measure(cut) >= target; -inf if not `wanted`.

    `measure` falls as the cut rises. The bisection runs over the integers that order float32, so
    it ends after at most 32 steps with the exact value of a logit, or sooner with a cut that
    keeps the same tokens.
    """
    start = jnp.where(wanted, _to_key(low), _to_key(high))

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        step, low, high = state
        return (step < 32) & jnp.any(low + 1 < high)

    def halve(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        step, low, high = state
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        value = measure(_from_key(middle))
        met = (value >= target) & (low + 1 < high)
        # At equality the cut keeps exactly the wanted tokens: no larger one keeps more.
        high = jnp.where(met & (value == target), middle + 1, jnp.where(met, high, middle))
        return step + 1, jnp.where(met, middle, low), jnp.maximum(high, low + 1)

    _, found, _ = lax.while_loop(unfinished, halve, (jnp.int32(0), start, _to_key(high) + 1))
    return jnp.where(wanted, _from_key(found), -jnp.inf)


def _to_key(x: jax.Array) -> jax.Array:
    """i32 that orders as the f32 `x` does (Herf, "Radix tricks", 2001); NaN counts as -inf."""
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), -jnp.inf, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ _INT32_MAX, bits)


def _from_key(key: jax.Array) -> jax.Array:
    """The f32 behind a key of `_to_key`."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ _INT32_MAX, key), jnp.float32)


def _logprobs(
    logits: jax.Array, tokens: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-softmax of `logits` f32[S, V] at `tokens` i32[S] and at its `count` largest values.

    Returns:
        f32[S], i32[S, count] and f32[S, count], ties by lowest id.
    """
    num_rows, vocab = logits.shape
    top = logits.max(axis=1)
    sums = _blocks(jnp.exp(logits - top[:, None]), _BLOCK, 0.0).sum(axis=2).sum(axis=1)
    log_total = top + jnp.log(sums)
    logprob = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - log_total
    blocks = _blocks(logits, _CANDIDATE_BLOCK, -jnp.inf)
    num_blocks, size = blocks.shape[1:]
    if count < num_blocks:
        values, chosen, _ = _candidates(blocks, count)
    else:
        values = blocks.reshape(num_rows, -1)
        chosen = jnp.broadcast_to(jnp.arange(num_blocks)[None, :], (num_rows, num_blocks))
    kept = min(count, vocab)
    best, place = lax.top_k(values, kept)
    ids = jnp.take_along_axis(chosen, place // size, axis=1) * size + place % size
    missing = ((0, 0), (0, count - kept))
    return (
        logprob,
        jnp.pad(ids.astype(jnp.int32), missing, constant_values=-1),
        jnp.pad(best - log_total[:, None], missing, constant_values=-jnp.inf),
    )
