"""Choosing the next token of every row: one traced function for all requests.

Order, following vLLM's sampler:

1.  log probabilities: log-softmax of the unmodified logits (vLLM's `raw_logprobs`), so they
    describe the model and not the request's settings;
2.  logit bias, and stop tokens barred before `min_tokens`;
3.  user logits processors, in the order of the engine's list, on the rows that asked;
4.  penalties: repetition, then frequency, then presence;
5.  tokens that structured output does not allow are barred;
6.  temperature (0: take the argmax here), min-p, top-k, top-p, draw.

Min-p, top-k and top-p each keep every token from some logit upwards. So they are three thresholds,
found without sorting, and ties at a threshold are all kept: top-k keeps more than k tokens when
the k-th largest logit is not unique. Top-p keeps the smallest such set whose share of the mass
left by min-p and top-k is at least p, and always at least one token.

What no row asks for is skipped at run time by `lax.cond`; a greedy batch costs one argmax.
Dimension letters: S batch rows, R persistent rows, V vocabulary, L places of a row, B bias entries,
E stop tokens, K reported log probabilities.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hybrid_jax.runtime.batch import TokenMasks
from hybrid_jax.runtime.logprobs import Logprobs, token_logprobs
from hybrid_jax.runtime.vocabulary import all_finite, argmax, cutoff, draw, keep_allowed
from hybrid_jax.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

_MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 64  # the request's and the model's
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
    logprobs: Logprobs  # of `tokens`; nothing when no row asked
    finite: jax.Array  # bool[S] no NaN or Inf in the logits
    usable: jax.Array  # bool[S] what the request asked for left something to choose


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

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of the table."""
        return sum(array.nbytes for array in self._neutral.values())

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
            "num_logprobs": -1 if params.num_logprobs is None else params.num_logprobs,
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
        table = self._table
        if table is None:
            # Copies: on CPU, device arrays may share memory with the numpy arrays they come from,
            # and a step still in flight must not see the next step's rows.
            copies = SamplingTable(**{name: array.copy() for name, array in self._host.items()})  # type: ignore[arg-type]
            table = self._table = jax.device_put(copies, self._sharding)
        return table

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
    masks: TokenMasks | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
    group: int | None = None,
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
        masks: the tokens that each row may take; None: all, and no code for it.
        processors: the functions behind the columns of `table.processors`. Pure JAX; each maps
            (f32[rows, V], LogitsContext) to f32[rows, V] for any number of rows.
        group: rows worked on at once when not all are plain greedy; it must divide S. None: one
            on CPU, all elsewhere. One by one, each row pays only for what it uses and the
            temporaries stay in the cache; on an accelerator the launches would dominate.

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

    def chosen() -> tuple[jax.Array, jax.Array]:
        context = LogitsContext(history[row_ids], seq_lens, rows.prompt_len)
        arguments = (logits, rows, context, masks)
        return _in_groups(partial(_adjust_and_choose, processors), arguments, group)

    plain = (rows.temperature <= 0.0) & ~_adjusted(rows, seq_lens, masks)
    tokens, usable = lax.cond(
        jnp.all(plain), lambda: (argmax(logits), jnp.ones_like(plain)), chosen
    )
    logprobs = lax.cond(
        jnp.any(rows.num_logprobs >= 0),
        lambda: _in_groups(partial(token_logprobs, count=max_logprobs), (logits, tokens), group),
        lambda: Logprobs.none(logits.shape[0], max_logprobs),
    )
    return Sampled(tokens, logprobs, all_finite(logits), usable)


def _adjust_and_choose(
    processors: tuple[LogitsProcessor, ...],
    logits: jax.Array,
    rows: SamplingTable,
    context: LogitsContext,
    masks: TokenMasks | None,
) -> tuple[jax.Array, jax.Array]:
    """Tokens i32[S], and bool[S] whether the adjustments left something to choose."""
    adjusted = _adjust(logits, rows, context, processors)
    if masks is not None:
        adjusted = lax.cond(
            jnp.any(masks.constrained),
            lambda x: keep_allowed(x, jnp.where(masks.constrained[:, None], masks.allowed, -1)),
            lambda x: x,
            adjusted,
        )
    usable = ~jnp.isnan(adjusted).any(axis=1) & (adjusted.max(axis=1) > -jnp.inf)
    return _choose(adjusted, rows, context.seq_lens), usable


def _in_groups(function: Callable[..., Any], arguments: tuple[Any, ...], group: int | None) -> Any:
    """`function(*arguments)`, on `group` rows at a time; None: by platform, see `sample`."""
    num_rows = jax.tree.leaves(arguments)[0].shape[0]

    def one_by_one(*arguments: Any) -> Any:
        return _in_groups(function, arguments, 1)

    if group == num_rows:
        return function(*arguments)
    if group is None:
        # Decided when lowering, so that a step compiled for another platform gets its form.
        return lax.platform_dependent(*arguments, cpu=one_by_one, default=function)
    split = jax.tree.map(lambda x: x.reshape(num_rows // group, group, *x.shape[1:]), arguments)
    results = lax.map(lambda part: function(*part), split)
    return jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), results)


def _adjusted(rows: SamplingTable, seq_lens: jax.Array, masks: TokenMasks | None) -> jax.Array:
    """bool[S]: something but the temperature changes the row."""
    adjusted = _biased(rows, seq_lens) | _penalised(rows) | rows.processors.any(axis=1)
    return adjusted if masks is None else adjusted | masks.constrained


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
    context: LogitsContext,
    processors: tuple[LogitsProcessor, ...],
) -> jax.Array:
    """f32[S, V] logits after everything that can change the most likely token."""
    seq_lens = context.seq_lens
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
        cut = cutoff(logits, kept, top_k, top_p)
        return draw(jnp.where(logits >= cut[:, None], kept, 0.0), rows.seed, seq_lens)

    filters = (top_k > 0) | (top_p < 1.0) | (random & (rows.min_p > 0.0))
    return lax.cond(jnp.any(filters), filtered, lambda: draw(weigh(), rows.seed, seq_lens))
