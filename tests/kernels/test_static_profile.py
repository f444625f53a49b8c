"""Estimates by libtpu's static profile: which kernels are looked at, and what they are told."""

import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import static_profile
from pallas_kernels.bench_operands import Batch, Call, cases_of, make_call
from pallas_kernels.static_profile import Kernel, Trial, profile_sizes, targeting
from tests.helpers.tpu import needs_libtpu, pretend_libtpu

KEYS = ("gla.decode_heads 4x4x524288", "gla.prefill_heads 4x4x256x512x2")


def gla_1b(batch: Batch) -> Call:
    return make_call("gla", next(case for case in cases_of("gla") if case.name == "gla_1b"), batch)


def test_only_what_the_size_changes_counts_and_not_below_the_time_of_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_libtpu(monkeypatch, installed=True)
    asked: list[tuple[int, str]] = []

    def profile(trial: Trial, kernel: str) -> int:
        asked.append((trial.size, kernel))
        if trial.size == 4:
            raise static_profile.NoProfileError("took too long")
        return {1: 10**9, 2: 1}[trial.size]

    monkeypatch.setattr(static_profile, "_profile", profile)
    batch = Batch(2, 0, 8)
    # Both kernels move states of 4 heads in and out of 2 slots, and little else.
    states = 2 * 2 * 4 * 256 * 512 * 4
    for key, part in zip(KEYS, ("decode", "prefill"), strict=True):
        asked.clear()
        with targeting("v6e"):
            cycles, failed = profile_sizes(
                gla_1b(batch), Trial("gla", "gla_1b", batch, "v6e", key, 1), (1, 2, 4)
            )
        assert [size for size, _ in asked] == [1, 2, 4]
        assert all(part in kernel for _, kernel in asked)
        assert failed == {4: "took too long"} and cycles[1] == 10**9
        assert states / 776 < cycles[2] < 1.3 * states / 776


def test_kernels_and_their_index_maps_read_the_scalars() -> None:
    """Of vectors of few lines, which are added, and of others, which the first grid step stores."""
    rng = np.random.default_rng()
    values = [
        np.array([14, 7, 13, 13, 13, 45, 36, 0]),
        rng.integers(-3, 4, 40),
        rng.integers(0, 9, (2, 3)),
        rng.permutation(4),
    ]
    values = [value.astype(np.int32) for value in values]

    def body(bits: Any, long: Any, table: Any, blocks: Any, x: Any, out: Any, read: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        for lane in range(8):
            read[i, j, lane] = bits[lane]
        for n in range(4):
            read[i, j, 8 + n] = bits[2 * i + n + j]
        for n in range(40):
            read[i, j, 12 + n] = long[n]
        for n in range(6):
            read[i, j, 52 + n] = table[n // 3, n % 3]
        del blocks  # used by the index map
        out[...] = x[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(2, 2),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j, bits, long, table, at: (at[2 * i + j], 0))],
        out_specs=[
            pl.BlockSpec((8, 128), lambda i, j, *_: (2 * i + j, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ],
    )
    x = jnp.repeat(jnp.arange(4.0), 8)[:, None] * jnp.ones((1, 128))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((2, 2, 58), jnp.int32)]
    operands = (*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values), shapes[0])
    kernel = Kernel(body, {"grid_spec": spec, "out_shape": shapes}, operands)
    told, options = static_profile._with_scalars(kernel, values)
    zeros = [jnp.zeros(value.shape, value.dtype) for value in values]
    out, read = pl.pallas_call(told, interpret=pltpu.InterpretParams(), **options)(*zeros, x)
    np.testing.assert_array_equal(out[::8, 0], values[3])
    for i, j in np.ndindex(2, 2):
        bits = values[0][2 * i + j : 2 * i + j + 4]
        expected = np.concatenate([values[0], bits, values[1], values[2].reshape(-1)])
        np.testing.assert_array_equal(read[i, j], expected)


@pytest.mark.parametrize(
    ("code", "errors", "said"),
    [
        (-24, "", "no profile within 300 s of CPU"),
        (
            -6,
            "F1130 12:57:38.8 1 llo_module.cc:66] Failed",
            "libtpu aborted without a profile",
        ),
        (
            -6,
            "F1130] Static LLO profiling of gla_decode.1 failed: no such op\n",
            "^Static LLO .* no such op",
        ),
        (1, "Traceback\njax.errors.JaxRuntimeError: INTERNAL: Mosaic failed\n", "Mosaic failed"),
    ],
)
def test_a_process_without_a_profile_says_why(
    code: int, errors: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, "", errors)

    monkeypatch.setattr(static_profile.subprocess, "run", run)
    trial = Trial("gla", "gla_1b", Batch(2, 0, 1), "v6e", KEYS[0], 1)
    with pytest.raises(static_profile.NoProfileError, match=said):
        static_profile._profile(trial, "gla_decode")


def test_every_kernel_of_a_call_has_a_profile_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_libtpu(monkeypatch, installed=True)

    def profile(trial: Trial, kernel: str, cpu_seconds: int) -> int:
        assert (trial.key, cpu_seconds) == ("", 7)
        if "decode" in kernel:
            raise static_profile.NoProfileError("took too long")
        return 12

    monkeypatch.setattr(static_profile, "_profile", profile)
    batch = Batch(1, 0, 8)
    with targeting("v6e"):
        found = static_profile.profile_kernels(
            gla_1b(batch), Trial("gla", "gla_1b", batch, "v6e"), cpu_seconds=7
        )
    assert [(x.kernel, x.cycles, x.failed) for x in found] == [
        ("gla_decode", None, "took too long"),
        ("gla_prefill", 12, ""),
    ]
    # A state of 4 heads goes in and out.
    assert all(x.least >= 2 * 4 * 256 * 512 * 4 / 776 for x in found)


@needs_libtpu
@pytest.mark.slow
def test_libtpu_profiles_a_kernel() -> None:
    """Twice the rows take about twice as long, which no kernel does that finds zeros as scalars."""
    cycles = [
        static_profile._profile(Trial("gla", "gla_1b", Batch(rows, 1, 1), "v6e", KEYS[0], 1), name)
        for rows, name in ((2, "gla_decode"), (4, "gla_decode"))
    ]
    # Of every row a state goes in and out; of two rows in turn those overlap.
    assert cycles[0] > 2 * 4 * 256 * 512 * 4 / 776
    assert 1.5 < cycles[1] / cycles[0] < 2.2


@needs_libtpu
@pytest.mark.slow
def test_libtpu_profiles_a_kernel_of_many_operands() -> None:
    """It reads its segments at computed indices, of which a kernel does nothing if they are 0."""
    trials = [
        Trial("gated_delta_rule", "kimi_linear_48b", Batch(1, 0, tokens), "v6e")
        for tokens in (128, 384)
    ]
    short, long = (static_profile._profile(trial, "gated_delta_prefill") for trial in trials)
    assert long - short > 2 * 15_000  # of a chunk: its instructions alone
