"""What arrays weigh on chips, against the numbers of XLA's own compilers."""

import math

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.cache.chips import (
    CHIPS,
    available_bytes,
    check_float8,
    device_bytes,
    find_chip,
    format_bytes,
    host_memory,
)
from tests.helpers.tpu import compile_for, needs_libtpu

# Shape, dtype and bytes of an argument as libtpu's `memory_analysis` gives them, for v5e and tpu7x.
TPU_BYTES = [
    ((1001, 16, 4, 256), "bfloat16", 32800768),  # pages of two KV heads: nothing is padded
    ((1001, 16, 2, 64), "bfloat16", 4194304),  # heads of 64: pages become lanes
    ((1001, 16, 60, 128), "bfloat16", 246005760),  # 30 KV heads: tokens become rows of tiles
    ((1001, 16, 6, 128), "float32", 49201152),
    ((1001, 16, 2, 256), "float32", 32800768),
    ((1001, 16, 2, 256), "float8_e4m3fn", 8200192),
    ((1001, 16, 4, 80), "bfloat16", 10485760),
    ((17, 3, 8192), "bfloat16", 1114112),  # convolution tails: three rows take four
    ((17, 3, 8192), "float32", 2228224),
    ((513, 3, 8192), "bfloat16", 25559040),  # ... and less where slots fill tiles
    ((17, 32, 128, 128), "float32", 35651584),
    ((17, 30, 96, 192), "float32", 50135040),  # 192 lanes take 256
    ((17, 4, 8, 16), "float32", 262144),
    ((17, 8192), "int32", 786432),  # histories
    ((17,), "int32", 512),
    ((2048,), "float32", 8192),
    ((8192, 4), "bfloat16", 65536),
    ((248320, 2560), "bfloat16", 1271398400),
    ((5, 3), "float32", 2048),
]


def test_a_chip_without_float8_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="which a100 is not; use bfloat16 or one of v4, v5e"):
        check_float8(find_chip("a100"))
    for name in ("cpu", "v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "b200"):
        check_float8(find_chip(name))


@pytest.mark.parametrize("shape, dtype, nbytes", TPU_BYTES)
def test_tpu_tiles_are_padded_as_the_compiler_does(
    shape: tuple[int, ...], dtype: str, nbytes: int
) -> None:
    assert device_bytes(shape, dtype, "tpu") == nbytes


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
def test_the_compiler_still_says_so(chip: str) -> None:
    for shape, dtype, nbytes in TPU_BYTES:
        argument = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        compiled = compile_for(chip, lambda x: x.reshape(-1)[0], (argument,))
        analysis = compiled.memory_analysis()
        assert analysis is not None and analysis.argument_size_in_bytes == nbytes, shape


@pytest.mark.parametrize("platform, alignment", [("cpu", 64), ("gpu", 256), ("", 1)])
def test_elsewhere_only_the_ends_of_buffers_are_padded(platform: str, alignment: int) -> None:
    for shape in ((1,), (3, 5), (17, 3, 96), (64, 64)):
        size = 2 * math.prod(shape)
        nbytes = device_bytes(shape, "bfloat16", platform)
        assert nbytes % alignment == 0 and size <= nbytes < size + alignment


def test_chips_by_name() -> None:
    assert find_chip("v5e").memory_bytes == 16 * 2**30
    assert find_chip("cpu").memory_bytes == host_memory().total
    assert find_chip("").platform == jax.default_backend()
    assert all(chip.topology for chip in CHIPS.values() if chip.platform == "tpu")
    with pytest.raises(ValueError, match="chip 'v99' is not known; choose cpu, v4, v5e"):
        find_chip("v99")


def test_the_host_has_what_it_has() -> None:
    memory = host_memory()
    assert 0 < memory.available <= memory.total
    # What runs beside the tests may take or give back memory between two looks.
    assert available_bytes(0.5) == pytest.approx(memory.available / 2, rel=0.5)
    more = available_bytes(0.5, loaded=2**40) - available_bytes(0.5)
    assert more == pytest.approx(2**39, rel=0.01)


def test_bytes_for_people() -> None:
    words = {0: "0 B", 1023: "1,023 B", 1536: "1.5 KiB", 5 * 2**20: "5.0 MiB", 2**41: "2,048.0 GiB"}
    assert {n: format_bytes(n) for n in words} == words
