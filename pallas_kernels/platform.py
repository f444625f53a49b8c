"""Which device a kernel is being built for."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax

PLATFORMS = ("cpu", "gpu", "tpu")


class Device(NamedTuple):
    """The device that compiled code will run on."""

    platform: str  # cpu, gpu or tpu
    kind: str  # as the runtime names it, e.g. "TPU v5 lite" or "NVIDIA H100"


_target: ContextVar[Device | None] = ContextVar("target", default=None)


def current() -> Device:
    """The device set by `target`, otherwise the default backend's first device."""
    device = _target.get()
    if device is not None:
        return device
    first = jax.local_devices()[0]
    # jax.default_backend() says "gpu" for CUDA and ROCm alike; Device.platform may say "cuda".
    return Device(jax.default_backend(), first.device_kind)


@contextmanager
def target(platform: str, kind: str) -> Iterator[None]:
    """Selects kernels for a device other than the one at hand, for compiling without a device.

    Selection happens while tracing, and jit's cache does not know about it: trace a fresh function
    inside the context.

    Raises:
        ValueError: `platform` is not one of `PLATFORMS`.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"unknown platform {platform!r}; use one of {', '.join(PLATFORMS)}")
    token = _target.set(Device(platform, kind))
    try:
        yield
    finally:
        _target.reset(token)
