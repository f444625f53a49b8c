"""The sampler against an independent, sort-based float64 implementation."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.runtime import vocabulary
from hybrid_jax.runtime.logprobs import token_logprobs
from hybrid_jax.runtime.sampling import LogitsContext, SamplingRows, _adjust, sample
from hybrid_jax.sampling_params import SamplingParams

ROWS, VOCAB, LENGTH, TOP = 8, 1000, 24, 5


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def ban_even(logits: jax.Array, context: LogitsContext) -> jax.Array:
    even = jnp.arange(logits.shape[1])[None, :] % 2 == 0
    return jnp.where(even, -jnp.inf, logits)


def favour_last(logits: jax.Array, context: LogitsContext) -> jax.Array:
    rows = jnp.arange(logits.shape[0])
    return logits.at[rows, context.history[rows, context.seq_lens - 1]].add(1e4)


NAMES, PROCESSORS = ("ban_even", "favour_last"), (ban_even, favour_last)
traces: list[tuple[int, ...]] = []


@functools.partial(jax.jit, static_argnames="group")
def run(logits: Any, table: Any, ids: Any, lens: Any, history: Any, group: int | None) -> Any:
    traces.append(logits.shape)
    return sample(
        logits, table, ids, lens, history, max_logprobs=TOP, processors=PROCESSORS, group=group
    )


def draw(
    logits: np.ndarray,
    params: list[SamplingParams],
    *,
    seeds: list[int] | None = None,
    lens: list[int] | None = None,
    prompt: int = 2,
    history: np.ndarray | None = None,
    stop_ids: tuple[int, ...] = (),
    group: int | None = None,
) -> Any:
    """Samples row i of `logits` with params[i], on persistent rows in reverse order.

    Padded to one shape with null rows and, beyond the vocabulary, -inf: compiling takes seconds.
    """
    count = len(params)
    table = SamplingRows(ROWS, max_logit_bias=4, processors=NAMES)
    ids = np.zeros(ROWS, np.int32)
    ids[:count] = np.arange(count, 0, -1)
    rows = np.full((ROWS + 1, LENGTH), -7, np.int32)
    for i, row in enumerate(ids[:count]):
        table.set_row(row, params[i], seeds[i] if seeds else i, prompt, stop_ids=stop_ids)
        if history is not None:
            rows[row] = history[i]
    padded = np.full((ROWS, VOCAB), -np.inf, np.float32)
    padded[:count, : logits.shape[1]] = logits
    lens_ = np.zeros(ROWS, np.int32)
    lens_[:count] = lens or [3] * count
    got = jax.device_get(run(padded, table.device(), ids, lens_, rows, group))
    return jax.tree.map(lambda x: x[:count], got)


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def expected_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of one row after min-p, top-k and top-p: float64, by sorting."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < params.min_p * probs.max()] = 0.0
    if params.top_k > 0:
        probs[logits < np.sort(logits)[::-1][min(params.top_k, len(logits)) - 1]] = 0.0
    probs /= probs.sum()
    if params.top_p < 1.0:
        order = np.argsort(-logits, kind="stable")
        last = int(np.searchsorted(np.cumsum(probs[order]), params.top_p))
        probs[logits < logits[order[min(last, len(order) - 1)]]] = 0.0
    return probs / probs.sum()


# -- thresholds


@jax.jit
def kept_set(logits: Any, temperature: Any, min_p: Any, top_k: Any, top_p: Any) -> Any:
    weights = jnp.exp((logits - logits.max(1, keepdims=True)) / temperature[:, None])
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)
    cut = vocabulary.cutoff(logits, weights, top_k, top_p)
    return (logits >= cut[:, None]) & (weights > 0.0)


SETTINGS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.937},
    {"min_p": 0.11},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.03},
    {"top_k": 3, "top_p": 0.99},
    {},
]


@pytest.mark.parametrize("temperature", [0.3, 1.7])
@pytest.mark.parametrize("vocab", [50, 1000, 40000])
@pytest.mark.parametrize("tied", [False, True])
def test_kept_sets(vocab: int, temperature: float, tied: bool) -> None:
    logits = random_logits(len(SETTINGS), vocab, seed=vocab)
    if tied:
        logits = np.round(logits * 2) / 2  # includes -0.0 beside 0.0
    params = [SamplingParams(temperature=temperature, **setting) for setting in SETTINGS]
    columns = [
        np.array([getattr(p, name) for p in params], kind)
        for name, kind in (
            ("temperature", np.float32),
            ("min_p", np.float32),
            ("top_k", np.int32),
            ("top_p", np.float32),
        )
    ]
    kept = np.asarray(kept_set(logits, *columns))
    for row, setting in enumerate(params):
        want = expected_distribution(logits[row], setting)
        np.testing.assert_array_equal(kept[row], want > 0, err_msg=str(SETTINGS[row]))


@pytest.mark.parametrize("scattered", [False, True])
def test_candidates_and_full_search_agree(monkeypatch: Any, scattered: bool) -> None:
    # 512 blocks: 256 of them are candidates; a flat row has too large a nucleus for them.
    logits = random_logits(2, 512 * 128, seed=3, scale=0.1 if scattered else 6.0)
    arguments = (
        jnp.exp(logits - logits.max(1, keepdims=True)),
        jnp.array([0, 50], jnp.int32),
        jnp.array([0.9, 0.9], jnp.float32),
    )
    near = jax.jit(vocabulary.cutoff)(logits, *arguments)
    monkeypatch.setattr(vocabulary, "CANDIDATE_BLOCKS", 10**6)  # more than there are: no prefilter
    full = jax.jit(lambda *a: vocabulary.cutoff(*a))(logits, *arguments)
    # A cut between the same two logits may differ; the tokens kept may not.
    for row in range(2):
        np.testing.assert_array_equal(logits[row] >= near[row], logits[row] >= full[row])


# -- argmax


@pytest.mark.parametrize("vocab", [1, 5, 64, 640, 1000, 4096])
def test_argmax_is_jnp_argmax(vocab: int) -> None:
    x = np.round(random_logits(6, vocab, seed=vocab))  # many ties
    x[1] = 3.0
    x[2] = -np.inf
    x[3, -1] = np.inf
    x[4, vocab // 2] = np.nan
    x[5] = np.nan
    found = np.asarray(jax.jit(vocabulary.argmax)(x))
    np.testing.assert_array_equal(found[:4], np.argmax(x[:4], axis=1))
    assert ((found >= 0) & (found < vocab)).all()


def test_nan_rows_give_some_token_and_leave_others_alone() -> None:
    logits = random_logits(5, 1000)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=5, top_p=0.5, min_p=0.1, logprobs=2),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.9, repetition_penalty=1.2),
    ]
    clean = draw(logits, params)
    logits[1:3] = np.nan
    logits[3, 5] = np.nan
    dirty = draw(logits, params)
    assert ((dirty.tokens >= 0) & (dirty.tokens < 1000)).all()
    assert dirty.tokens[0] == clean.tokens[0] and dirty.tokens[4] == clean.tokens[4]


# -- draws


@functools.partial(jax.jit, static_argnums=2)
def draw_many(logits: Any, table: Any, count: int) -> Any:
    return sample(
        jnp.tile(logits[None, :], (count, 1)),
        table,
        jnp.ones(count, jnp.int32),
        jnp.arange(count, dtype=jnp.int32),  # a new position is a new draw
        jnp.zeros((2, 1), jnp.int32),
        max_logprobs=0,
        group=count,
    )


@pytest.mark.parametrize(
    "setting", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.4}]
)
def test_draws_follow_the_distribution(setting: dict[str, Any]) -> None:
    # Chi-square over 10,000 draws with fixed seeds; 600 tokens make two blocks of the draw.
    logits = random_logits(1, 600, seed=5)[0]
    params = SamplingParams(**setting)
    count = 10000
    table = SamplingRows(1)
    table.set_row(1, params, 11, 0)
    drawn = draw_many(logits, table.device(), count).tokens
    want = expected_distribution(logits, params) * count
    seen = np.bincount(np.asarray(drawn), minlength=600)
    assert (seen[want == 0] == 0).all()
    common = want >= 5
    pairs = [(seen[common], want[common])]
    if want[~common].sum() >= 5:
        pairs.append((seen[~common].sum(keepdims=True), want[~common].sum(keepdims=True)))
    chi = sum(((a - b) ** 2 / b).sum() for a, b in pairs)
    freedom = sum(len(b) for _, b in pairs) - 1
    # Wilson-Hilferty: the cube root of chi-square / freedom is nearly normal; 4 sigma.
    sigma = np.sqrt(2 / (9 * freedom))
    assert abs(np.cbrt(chi / freedom) - (1 - sigma**2)) < 4 * sigma


@pytest.mark.parametrize("group", [None, ROWS])
def test_a_row_is_independent_of_its_batch(group: int | None) -> None:
    logits = random_logits(6, VOCAB, seed=9, scale=1.0)
    params = [
        SamplingParams(),
        SamplingParams(top_k=50, temperature=1.3),
        SamplingParams(top_p=0.9, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(min_p=0.02, logit_bias={7: 5.0}),
        SamplingParams(temperature=2.0, logits_processors=("ban_even",)),
    ]
    history = np.random.default_rng(1).integers(0, VOCAB, (6, LENGTH))
    lens = [3, 9, 12, 20, 5, 7]
    together = draw(logits, params, lens=lens, history=history, group=group).tokens
    order = [4, 2, 5, 0, 3, 1]
    mixed = draw(
        logits[order],
        [params[i] for i in order],
        seeds=order,
        lens=[lens[i] for i in order],
        history=history[order],
        group=group,
    ).tokens
    np.testing.assert_array_equal(mixed, together[order])
    for i in range(6):
        alone = draw(
            logits[i : i + 1], [params[i]], seeds=[i], lens=[lens[i]], history=history[i : i + 1]
        )
        assert alone.tokens[0] == together[i]


def test_seed_and_position_change_the_draw() -> None:
    logits = np.zeros((8, VOCAB), np.float32)
    params = [SamplingParams()] * 8
    by_seed = draw(logits, params).tokens
    by_position = draw(logits, params, seeds=[1] * 8, lens=list(range(1, 9))).tokens
    same = draw(logits, params, seeds=[1] * 8).tokens
    assert len(set(by_seed)) > 5 and len(set(by_position)) > 5 and len(set(same)) == 1


def test_extreme_temperatures() -> None:
    logits = random_logits(2, 1000, seed=2) * 1e4
    cold, hot = SamplingParams(temperature=1e-5), SamplingParams(temperature=100.0, top_p=0.5)
    assert draw(logits, [cold, hot]).tokens[0] == logits[0].argmax()


# -- what changes the logits


def expected_penalties(x: np.ndarray, p: SamplingParams, tokens: list[int], prompt: int) -> Any:
    x = x.astype(np.float64)
    for token in set(tokens):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token in tokens[prompt:]:
        x[token] -= p.frequency_penalty
    for token in set(tokens[prompt:]):
        x[token] -= p.presence_penalty
    return x


def seen_logits(adjust: SamplingParams, logits: np.ndarray, **kwargs: Any) -> np.ndarray:
    """The logits `_adjust` makes of one row."""
    history = np.asarray(kwargs["history"], np.int32)
    table = SamplingRows(1, max_logit_bias=4, processors=NAMES)
    table.set_row(1, adjust, 0, kwargs["prompt"], stop_ids=kwargs.get("stop_ids", ()))
    rows = jax.tree.map(lambda a: a[1:], table.device())
    context = LogitsContext(
        jnp.asarray(history)[None, :], jnp.array([kwargs["length"]], jnp.int32), rows.prompt_len
    )
    return np.asarray(_adjust(jnp.asarray(logits)[None, :], rows, context, PROCESSORS))[0]


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.1},
        {"frequency_penalty": -0.6},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
)
def test_penalties(setting: dict[str, float]) -> None:
    logits = random_logits(1, 40, seed=4)[0]
    history = np.random.default_rng(2).integers(0, 12, LENGTH)
    history[15:] = np.random.default_rng(3).integers(-(2**31), 2**31, LENGTH - 15)  # garbage
    params = SamplingParams(**setting)
    got = seen_logits(params, logits, history=history, prompt=6, length=15)
    want = expected_penalties(logits, params, list(history[:15]), 6)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_repetition_penalty_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(1, 40, seed=4)
    tokens = np.random.default_rng(2).integers(0, 12, LENGTH)
    want = processors.RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor(tokens[None, :]), torch.tensor(logits)
    )
    params = SamplingParams(repetition_penalty=1.3)
    got = seen_logits(params, logits[0], history=tokens, prompt=6, length=LENGTH)
    np.testing.assert_allclose(got, want[0].numpy(), rtol=1e-6)


def test_logit_bias_and_min_tokens() -> None:
    logits = np.zeros(40, np.float32)
    history = np.zeros(LENGTH)
    params = SamplingParams(logit_bias={0: -2.0, 39: 3.0}, min_tokens=4)
    early = seen_logits(params, logits, history=history, prompt=6, length=9, stop_ids=(5, 39))
    late = seen_logits(params, logits, history=history, prompt=6, length=10, stop_ids=(5, 39))
    want = np.zeros(40, np.float32)
    want[[0, 39]] = -2.0, 3.0
    np.testing.assert_array_equal(late, want)
    want[[5, 39]] = -np.inf
    np.testing.assert_array_equal(early, want)


def test_bias_comes_before_penalties() -> None:
    params = SamplingParams(logit_bias={3: 4.0}, repetition_penalty=2.0)
    got = seen_logits(params, np.zeros(8, np.float32), history=[3] * 5, prompt=5, length=5)
    assert got[3] == 2.0


@pytest.mark.parametrize("group", [None, ROWS])
def test_processors_touch_only_rows_that_asked(group: int | None) -> None:
    logits = np.tile(np.linspace(1.0, 0.0, 40, dtype=np.float32), (4, 1))  # argmax 0
    history = np.tile(np.arange(LENGTH), (4, 1))
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logits_processors=("ban_even",)),
        SamplingParams(temperature=0.0, logits_processors=("favour_last",)),
        SamplingParams(temperature=0.0, logits_processors=("favour_last", "ban_even")),
    ]
    tokens = draw(logits, params, lens=[5, 5, 7, 7], history=history, group=group).tokens
    # The last row: token 6 is banned before it is favoured.
    assert tokens.tolist() == [0, 1, 6, 1]


# -- log probabilities


def exact_logprobs(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    exact -= exact.max(1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(1, keepdims=True))


@pytest.mark.parametrize("vocab", [3, 700, 4096])
def test_logprobs(vocab: int) -> None:
    logits = np.round(random_logits(3, vocab, seed=vocab), 1)
    exact = exact_logprobs(logits)
    tokens = np.array([0, 1, 2], np.int32)
    compute = jax.jit(token_logprobs, static_argnums=2)
    logprob, ids, top = map(np.asarray, compute(logits, tokens, TOP))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    known = order.shape[1]
    np.testing.assert_allclose(logprob, exact[tokens, tokens], atol=2e-6, rtol=1e-6)
    np.testing.assert_array_equal(ids[:, :known], order)
    want = np.take_along_axis(exact, order, axis=1)
    np.testing.assert_allclose(top[:, :known], want, atol=2e-6, rtol=1e-6)
    assert (ids[:, known:] == -1).all() and np.isneginf(top[:, known:]).all()


@pytest.mark.parametrize("group", [None, ROWS])
def test_logprobs_describe_the_raw_logits(group: int | None) -> None:
    logits = random_logits(3, VOCAB)
    params = [
        SamplingParams(temperature=0.7, logit_bias={0: 50.0}, logprobs=5, top_k=1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    got = draw(logits, params, group=group)
    exact = exact_logprobs(logits)
    assert got.tokens[0] == 0
    np.testing.assert_allclose(
        got.logprobs.chosen, exact[np.arange(3), got.tokens], atol=2e-6, rtol=1e-6
    )
    np.testing.assert_array_equal(got.logprobs.top_ids, np.argsort(-logits, axis=1)[:, :TOP])


def test_logprobs_are_skipped_when_no_row_asks() -> None:
    got = draw(random_logits(2, 50), [SamplingParams(), SamplingParams(temperature=0.0)])
    assert not got.logprobs.chosen.any() and (got.logprobs.top_ids == -1).all()


# -- one trace, and the host's twin


def test_one_trace_serves_all_requests() -> None:
    logits = random_logits(2, 333)
    draw(logits, [SamplingParams()] * 2)  # the trace, unless an earlier test made it
    before = len(traces)
    for setting in (*SETTINGS, {"logprobs": 3}, {"seed": 5}, {"presence_penalty": 1.0}):
        draw(logits, [SamplingParams(**setting), SamplingParams(temperature=0.0)])
    assert len(traces) == before


def test_rows_upload_only_when_changed_and_never_alias() -> None:
    rows = SamplingRows(2)
    first = rows.device()
    assert rows.device() is first
    rows.set_row(1, SamplingParams(top_k=5, seed=-1), -1, 7)
    second = rows.device()
    assert second is not first and rows.device() is second
    assert np.asarray(second.top_k).tolist() == [0, 5, 0]
    assert int(second.seed[1]) == 2**32 - 1
    assert np.asarray(first.top_k).tolist() == [0, 0, 0]
    rows.clear_row(1)
    for name in ("temperature", "top_k", "top_p", "repetition", "num_logprobs", "bias_ids"):
        cleared = np.asarray(getattr(rows.device(), name))
        np.testing.assert_array_equal(cleared, np.asarray(getattr(first, name)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows: rows.set_row(0, SamplingParams(), 0, 1), "row must be in"),
        (lambda rows: rows.set_row(3, SamplingParams(), 0, 1), "row must be in"),
        (
            lambda rows: rows.set_row(1, SamplingParams(logits_processors=("x",)), 0, 1),
            "unknown name 'x'; registered with the engine: ban_even, favour_last",
        ),
        (
            lambda rows: rows.set_row(1, SamplingParams(logit_bias={1: 1, 2: 1, 3: 1}), 0, 1),
            "logit_bias must have at most 2 entries, got 3",
        ),
    ],
)
def test_rows_refuse_what_does_not_fit(call: Callable[[Any], None], message: str) -> None:
    rows = SamplingRows(2, max_logit_bias=2, processors=NAMES)
    before = rows.device()
    with pytest.raises(ValueError, match=message):
        call(rows)
    assert rows.device() is before


def test_processors_must_fit_the_table() -> None:
    with pytest.raises(ValueError, match="made for 0 logits processors, got 2"):
        sample(
            jnp.zeros((1, 8)),
            SamplingRows(1).device(),
            jnp.zeros(1, jnp.int32),
            jnp.zeros(1, jnp.int32),
            jnp.zeros((2, 4), jnp.int32),
            max_logprobs=0,
            processors=PROCESSORS,
        )
