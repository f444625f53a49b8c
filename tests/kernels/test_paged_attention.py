"""paged_attention against a float64 token-by-token oracle, on pools full of NaN."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import paged_attention as op
from pallas_kernels import registry, storage
from pallas_kernels.paged_attention.cases import CASES, Case
from tests.helpers.ragged import Rows, attention_oracle

SMALL = [case for case in CASES if case.name.startswith("tiny")]
LARGE = [case for case in CASES if not case.name.startswith("tiny")]
BATCHES = {
    "decode": Rows(decode=(0, 1, 7, 8, 9, 130, 300), pad_rows=2),
    "one_decode": Rows(decode=(17,)),
    "one_token_prompts": Rows(prefill=((0, 1), (0, 1), (5, 1)), pad_rows=1),
    "mixed": Rows(decode=(3, 150), prefill=((0, 63), (2, 64), (0, 65), (140, 40)), pad_rows=2,
                  pad_tokens=5),
    "long_prefill": Rows(prefill=((0, 200), (31, 129)), pad_tokens=40),
    "padding": Rows(pad_rows=4),
    "padding_mixed": Rows(pad_rows=4, pad_tokens=9),
}  # fmt: skip
IMPLEMENTATIONS = registry.implementations("paged_attention", "cpu")


class Setup:
    """Random rows, their pages, and what the op must return."""

    def __init__(self, case: Case, rows: Rows, seed: int = 0, spare: int = 0) -> None:
        """`spare` pads the table's width and the pool, so that batches can share a trace."""
        rng = np.random.default_rng(seed)
        self.case, self.rows = case, rows
        self.dtype = jnp.dtype(case.dtype)
        # What no token wrote: the worst that pages can hold.
        self.garbage = -127.0 if case.pages_dtype == "int8" else np.nan
        self.scales = _draw_scales(case, rng)
        self.sequences = [self._sequence(rng, sum(row)) for row in rows.all]
        shape = (rows.num_tokens, case.num_heads, case.head_dim)
        # Padding tokens are NaN: they must not reach any output.
        self.q = np.full(shape, np.nan)
        self.k, self.v = (np.full((shape[0], case.num_kv_heads, shape[2]), np.nan) for _ in "kv")
        for (earlier, _), tokens, (q, k, v) in zip(
            rows.all, rows.slices, self.sequences, strict=True
        ):
            self.q[tokens], self.k[tokens], self.v[tokens] = (x[earlier:] for x in (q, k, v))
        self.sinks = rng.normal(size=case.num_heads) if case.sinks else None
        self.spoiled = np.zeros(rows.num_tokens, bool)
        self._place(rng, spare)

    def _sequence(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        heads = (self.case.num_heads, self.case.num_kv_heads, self.case.num_kv_heads)
        drawn = (rng.normal(size=(length, n, self.case.head_dim)) for n in heads)
        # Rounded to the dtypes under test, so that the oracle sees what the op sees.
        q, k, v = (np.asarray(jnp.asarray(x, self.dtype), np.float64) for x in drawn)
        if self.scales is not None:
            # A value of pages times a scale: even in bfloat16 it is nearest to that value.
            k, v = (self._rounded(x / s) * s for x, s in zip((k, v), self.scales, strict=True))
        return q, k, v

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        """The nearest value that pages can hold."""
        if self.case.pages_dtype == "int8":
            return np.clip(np.rint(x), -127, 127)
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)

    def _place(self, rng: np.random.Generator, spare: int) -> None:
        """Tables of shuffled page ids; pools before (NaN but for live tokens) and after the op."""
        case, size = self.case, self.case.page_size
        live = []  # (row, logical page) that some token of this step sees or writes
        for earlier, query in self.rows.all:
            oldest = 0 if case.window is None else max(0, earlier - case.window + 1)
            live.append(range(oldest // size, (earlier + query - 1) // size + 1))
        width = max([len(pages) for pages in live] + [spare], default=0) + 1
        total = max(sum(len(pages) for pages in live), len(live) * spare) + 3
        ids = iter(rng.permutation(np.arange(1, total)))
        self.table = np.zeros((self.rows.num_rows, width), np.int32)
        pool = np.full((total, size, 2 * case.num_kv_heads, case.head_dim), self.garbage)
        self.before, self.after = pool, pool.copy()
        self.written = np.zeros((total, size), bool)  # by earlier steps
        for row, (earlier, query) in enumerate(self.rows.all):
            _, k, v = self.sequences[row]
            if self.scales is not None:
                k, v = k / self.scales[0], v / self.scales[1]
            for logical in live[row]:
                page = self.table[row, logical % width] = next(ids)
                for position in range(logical * size, min((logical + 1) * size, earlier + query)):
                    entry = np.stack([k[position], v[position]], axis=1)
                    self.after[page, position % size] = entry.reshape(-1, case.head_dim)
                    if position < earlier:
                        self.before[page, position % size] = self.after[page, position % size]
                        self.written[page, position % size] = True

    def spoil(self, rows: Iterable[int], value: float) -> None:
        """All keys and values of these rows are `value`: no other row must see them."""
        for row in rows:
            tokens = self.rows.slices[row]
            self.k[tokens] = self.v[tokens] = value
            for pool in (self.before, self.after):
                pages = pool[self.table[row]]
                pool[self.table[row]] = np.where(np.isnan(pages), pages, value)
            self.spoiled[tokens] = True

    def check_output(self, out: np.ndarray | jax.Array, atol: float) -> None:
        """Against the oracle, but for rows that are spoiled."""
        out, expected = (np.asarray(x, np.float64)[~self.spoiled] for x in (out, self.expected()))
        # `atol` is for values below 4: larger ones, of rows of few tokens, have coarser steps.
        rtol = 2**-9 if self.dtype == jnp.bfloat16 else 0.0
        np.testing.assert_allclose(out, expected, rtol=rtol, atol=atol)

    def expected(self) -> np.ndarray:
        """f64[T, N, H]: the oracle's output, 0 for padding."""
        out = np.zeros(self.q.shape)
        for (earlier, _), tokens, (q, k, v) in zip(
            self.rows.all, self.rows.slices, self.sequences, strict=True
        ):
            out[tokens] = attention_oracle(q[earlier:], k, v, **self.options, sinks=self.sinks)
        return out

    @property
    def options(self) -> dict:
        """The static options of the call."""
        scale = self.case.head_dim**-0.5
        return {"scale": scale, "window": self.case.window, "softcap": self.case.softcap}

    @property
    def arrays(self) -> dict[str, jax.Array | None]:
        """The optional arrays of the call."""
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[..., 0]
        optional = {"sinks": self.sinks, "k_scale": k_scale, "v_scale": v_scale}
        return {n: None if x is None else jnp.asarray(x, jnp.float32) for n, x in optional.items()}

    @property
    def pages_dtype(self) -> jnp.dtype:
        """Of the values in the pages."""
        return jnp.dtype(self.case.pages_dtype or self.case.dtype)

    def run(
        self, implementation: str, pages_dtype: jnp.dtype, platform: str | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The op's output and the values in its pool, laid out for `platform`, as float64."""
        call = _jitted(implementation, tuple(self.options.items()))
        q, k, v = (jnp.asarray(x, self.dtype) for x in (self.q, self.k, self.v))
        pages = storage.encode(self.pool(platform), pages_dtype)
        rest = jnp.asarray(self.table), self.rows.ragged()
        out, pages = call(q, k, v, pages, *rest, **self.arrays)
        assert out.dtype == self.dtype and pages.dtype == pages_dtype
        return np.asarray(out, np.float64), self.values(storage.decode(pages))

    def pool(self, platform: str | None = None) -> jax.Array:
        """`before` as the pages of a platform; what fills up rows is garbage where no token is."""
        case = self.case
        shape = op.pages_shape(*self.before.shape[:2], case.num_kv_heads, case.head_dim, platform)
        pages = op.pack(jnp.asarray(self.before, self.dtype), *shape[2:])
        return jnp.where(self.written[..., None, None], pages, self.garbage)

    def values(self, pages: jax.Array) -> np.ndarray:
        """What pages hold, in the order of `after`, as float64."""
        values = op.unpack(pages, self.case.num_kv_heads, self.case.head_dim)
        return np.asarray(values, np.float64)


def _draw_scales(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    """f64[2, K, 1]: of K and V, such that values of a few units reach the ends of the pages' dtype.

    float32 holds them, so that in float64 a division undoes a product.
    """
    if case.pages_dtype is None:
        return None
    largest = {"int8": 127.0, "float8_e4m3fn": 448.0}[case.pages_dtype]
    drawn = rng.uniform(2.5, 5.0, size=(2, case.num_kv_heads, 1)) / largest
    return drawn.astype(np.float32).astype(np.float64)


@functools.cache
def _jitted(implementation: str, options: tuple):
    return jax.jit(
        functools.partial(op.paged_attention, implementation=implementation, **dict(options))
    )


def check(setup: Setup, implementation: str, pages_dtype: jnp.dtype | None = None) -> None:
    out, pages = setup.run(implementation, pages_dtype or storage.storage_dtype(setup.pages_dtype))
    setup.check_output(out, setup.case.atol)
    # Page 0 is the null page: its contents mean nothing.
    np.testing.assert_array_equal(pages[1:], setup.after[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_shapes(case: Case, batch: str, implementation: str) -> None:
    check(Setup(case, BATCHES[batch]), implementation)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_what_is_not_finite_stays_in_its_row(case: Case, first: int) -> None:
    setup = Setup(case, BATCHES["mixed"])
    setup.spoil(range(first, len(setup.rows.all), 2), np.nan)
    check(setup, "reference")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow)
        if case.pages_dtype and case.head_dim > 8
        else case
        for case in LARGE
    ],
    ids=lambda case: case.name,
)
def test_model_shapes(case: Case, implementation: str) -> None:
    rows = Rows(decode=(4, 143), prefill=((0, 17), (120, 20)), pad_rows=1, pad_tokens=3)
    check(Setup(case, rows), implementation)


@pytest.mark.parametrize("lengths", [(511, 512, 513, 600)])
def test_decode_around_a_real_window(lengths: tuple[int, ...]) -> None:
    case = next(case for case in CASES if case.name == "gemma3_270m_local")
    check(Setup(case, Rows(decode=lengths)), "reference")


def test_bfloat16_pages_that_are_not_bits() -> None:
    """The layout that accelerators use must also be right on CPU."""
    case = next(case for case in CASES if case.name == "gemma3_270m_local")
    rows = Rows(decode=(20,), prefill=((0, 9),))
    check(Setup(case, rows), "reference", jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("kv_heads", "dim", "cpu", "tpu"),
    [
        (1, 64, (2, 64), (2, 128)),
        (2, 64, (4, 64), (2, 128)),
        (3, 64, (6, 64), (4, 128)),
        (8, 64, (16, 64), (8, 128)),
        (4, 32, (8, 32), (4, 128)),
        (8, 80, (16, 80), (16, 128)),
        (6, 96, (12, 96), (16, 128)),
        (8, 128, (16, 128), (16, 128)),
        (30, 128, (60, 128), (64, 128)),
        (1, 256, (2, 256), (2, 256)),
        (4, 320, (8, 320), (8, 384)),
    ],
)
def test_layouts_of_pages(
    kv_heads: int, dim: int, cpu: tuple[int, int], tpu: tuple[int, int]
) -> None:
    shapes = {name: op.pages_shape(9, 16, kv_heads, dim, name) for name in ("cpu", "gpu", "tpu")}
    assert shapes == {"cpu": (9, 16, *cpu), "gpu": (9, 16, *cpu), "tpu": (9, 16, *tpu)}
    kv = jnp.asarray(np.random.default_rng(3).normal(size=(5, 2 * kv_heads, dim)), jnp.float32)
    pages = np.asarray(op.pack(kv, *tpu))
    assert pages.shape == (5, *tpu)
    for head in range(kv_heads):  # by hand
        row, lane = (head, 64) if tpu[0] < 2 * kv_heads else (2 * head + 1, 0)
        first = pages[:, row if lane else row - 1]
        np.testing.assert_array_equal(first[:, :dim], kv[:, 2 * head])
        np.testing.assert_array_equal(pages[:, row, lane : lane + dim], kv[:, 2 * head + 1])
    assert np.count_nonzero(pages) == kv.size  # the rest is zero
    np.testing.assert_array_equal(op.unpack(jnp.asarray(pages), kv_heads, dim), kv)


@pytest.mark.parametrize("kv_heads", [2, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_a_cut_of_the_rows_is_a_cut_by_head(kv_heads: int, dim: int) -> None:
    rows, lanes = op.pages_shape(1, 1, kv_heads, dim, "tpu")[2:]
    kv = jnp.asarray(np.random.default_rng(4).normal(size=(3, 2 * kv_heads, dim)), jnp.float32)
    halves = [op.unpack(x, kv_heads // 2, dim) for x in jnp.split(op.pack(kv, rows, lanes), 2, 1)]
    np.testing.assert_array_equal(jnp.concatenate(halves, 1), kv)


@pytest.mark.parametrize(
    "case",
    [Case("shared", 6, 3, 8, page_size=4, window=9), Case("filled_up", 6, 3, 80, page_size=4)],
    ids=lambda case: case.name,
)
def test_the_reference_reads_pages_of_tpus(case: Case) -> None:
    setup = Setup(case, Rows(decode=(20,), prefill=((0, 9), (7, 30)), pad_rows=1))
    out, pages = setup.run("reference", setup.dtype, "tpu")
    np.testing.assert_allclose(out, setup.expected(), rtol=0, atol=case.atol)
    np.testing.assert_array_equal(pages[1:], setup.after[1:])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_pages_of_bytes_cost_what_their_rounding_says(dtype: str) -> None:
    """Against the oracle with K and V as they were before they were rounded.

    Scores that are off by at most e change no weight by more than a factor of exp(2 e). int8 rounds
    by up to half a scale, float8_e4m3fn by 2^-4 of a value, or 2^-10 of a scale near 0.
    """
    tokens, heads, kv_heads, dim, size = 40, 4, 2, 8, 4
    rng = np.random.default_rng()
    drawn = (rng.normal(size=(tokens, n, dim)) for n in (heads, kv_heads, kv_heads))
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in drawn)
    largest = 127.0 if dtype == "int8" else 448.0
    scales = [(np.abs(x).max(axis=(0, 2)) / largest).astype(np.float32) for x in (k, v)]
    shape = op.pages_shape(1 + tokens // size, size, kv_heads, dim)
    table = 1 + np.arange(tokens // size, dtype=np.int32)[None]
    out, _ = op.paged_attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        jnp.zeros(shape, dtype), jnp.asarray(table), Rows(prefill=((0, tokens),)).ragged(),
        scale=dim**-0.5, k_scale=jnp.asarray(scales[0]), v_scale=jnp.asarray(scales[1]),
    )  # fmt: skip

    def rounding(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        step = scale[None, :, None]
        if dtype == "int8":
            return np.broadcast_to(step / 2, x.shape)
        return np.maximum(np.abs(x) * 2**-4, step * 2**-10)

    off_k, off_v = (rounding(x, scale) for x, scale in zip((k, v), scales, strict=True))
    repeated = np.repeat(off_k, heads // kv_heads, axis=1)
    off = dim**-0.5 * np.einsum("qnh,knh->qnk", np.abs(q), repeated).max(axis=2)[..., None]
    average = functools.partial(
        attention_oracle, q, k, scale=dim**-0.5, window=None, softcap=None, sinks=None
    )
    error = np.abs(np.asarray(out, np.float64) - average(v))
    bound = np.expm1(2 * off) * average(np.abs(v)) + np.exp(2 * off) * average(off_v)
    assert (error <= bound + SMALL[0].atol).all()
    assert error.max() > 10 * SMALL[0].atol  # it does round


def test_what_bytes_cannot_hold_becomes_their_largest_value() -> None:
    values = jnp.array([1e9, -500.0, 448.0, jnp.nan, 0.0625], jnp.float32)
    stored = storage.decode(storage.encode(values, jnp.uint8)).astype(jnp.float32)
    np.testing.assert_array_equal(stored, [448.0, -448.0, 448.0, np.nan, 0.0625])
    values = jnp.array([1e9, -128.0, -1.6, 0.4, jnp.nan, 126.5], jnp.bfloat16)
    np.testing.assert_array_equal(storage.encode(values, jnp.int8), [127, -127, -2, 0, 0, 127])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_random_batches(case: Case) -> None:
    rng = np.random.default_rng(7)
    for seed in range(4):
        decode = tuple(int(n) for n in rng.integers(0, 40, size=3))
        prefill = tuple((int(n), int(t)) for n, t in rng.integers(1, 30, size=(3, 2)))
        used = 3 + sum(t for _, t in prefill)
        rows = Rows(decode, prefill, pad_rows=1, pad_tokens=96 - used)
        check(Setup(case, rows, seed, spare=70 // case.page_size + 1), "reference")


def test_window_does_not_see_further() -> None:
    """A change of the token just outside the window changes nothing; just inside, it does."""
    case = Case("narrow", 2, 1, 8, page_size=4, window=5)
    setup = Setup(case, Rows(decode=(12,)))
    out, _ = setup.run("reference", jnp.dtype("float32"))
    for position, changes in ((7, False), (8, True)):  # the query sits at 12: 12 - 5 < p
        page = setup.table[0, (position // 4) % setup.table.shape[1]]
        before = setup.before.copy()
        setup.before = before.copy()
        setup.before[page, position % 4] += 1.0
        changed, _ = setup.run("reference", jnp.dtype("float32"))
        setup.before = before
        assert np.array_equal(out, changed) is not changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"k": jnp.zeros((2, 2, 7))}, "k must be"),
        ({"pages": jnp.zeros((4, 4, 2, 8))}, "pages must be"),
        ({"table": jnp.zeros((3, 2), jnp.int32)}, "table must be"),
        ({"table": jnp.zeros((2, 2), jnp.int16)}, "table must be int32"),
        ({"pages": jnp.zeros((4, 4, 4, 8), jnp.int32)}, "pages must hold floating point"),
        ({"sinks": jnp.zeros(3)}, "sinks must be"),
        ({"k_scale": jnp.ones(4)}, r"k_scale must be \(2,\)"),
        ({"k_scale": 0.5}, r"k_scale must be an array of shape \(2,\), got 0.5"),
        ({"v_scale": jnp.ones(2, jnp.bfloat16)}, "v_scale must be float32"),
        ({"k": jnp.zeros((2, 0, 8))}, "4 query heads are not a multiple of 0 KV heads"),
        ({"implementation": "nonsense"}, "known: .*reference"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "q": jnp.zeros((2, 4, 8)),
        "k": jnp.zeros((2, 2, 8)),
        "v": jnp.zeros((2, 2, 8)),
        "pages": jnp.zeros((4, 4, 4, 8)),
        "table": jnp.zeros((2, 2), jnp.int32),
        "ragged": Rows(decode=(1, 1)).ragged(),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        op.paged_attention(**(arguments | change))
