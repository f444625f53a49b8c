"""What is measured: a model on a runner, and everything a figure must be quoted with."""

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import hybrid_jax
from hybrid_jax.cache.chips import host_memory
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.types import StepRunner
from hybrid_jax.inspection import kernel_report
from hybrid_jax.runtime.runner import Runner, open_model


def open_runner(model: str | Path, *, dtype: str = "auto", **engine_options: Any) -> Runner:
    """Loads a model to measure, without a tokenizer.

    Args:
        model: a Hugging Face directory, an Orbax checkpoint or a GGUF file.
        dtype: of weights and activations; "auto" takes the checkpoint's.
        **engine_options: fields of `EngineConfig`.

    Raises:
        ModelError: it is no model this library can run.
        ValueError: an option is unknown or out of range.
    """
    config = EngineConfig.of(engine_options)
    return Runner(open_model(model, dtype=dtype, config=config), config)


def describe(runner: StepRunner) -> dict[str, Any]:
    """The model, its engine and `describe_process`, for JSON."""
    live = runner.live_bytes()
    return {
        "model": {
            "type": runner.model_config.model_type,
            "layers": runner.model_config.layer_counts,
            "dtype": live.dtype,
            "parameter_bytes": live.parameters,
        },
        "engine": asdict(runner.config),
        **describe_process(),
    }


def describe_process() -> dict[str, Any]:
    """Machine, versions and the kernels chosen so far in this process, for JSON."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return {
        "machine": {
            "platform": jax.default_backend(),
            "devices": [device.device_kind for device in jax.devices()],
            "host": platform.platform(),
            "processor": processor(),
            "cores": len(affinity(0)) if affinity else os.cpu_count(),
            "load_average": os.getloadavg()[0],  # of others too: quote no figure of a busy machine
            "memory_bytes": host_memory().total,
        },
        "versions": {
            "hybrid_jax": hybrid_jax.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "kernels": [asdict(choice) for choice in kernel_report()],
    }


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
