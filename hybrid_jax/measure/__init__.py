"""Measuring a model on the device at hand: latency, throughput, where the time goes, states.

`open_runner` loads a model; every function makes fresh engines on it. No text is made of
tokens, and whatever compiles runs once before it is timed.
"""

from hybrid_jax.measure.latency import Latency, measure_latency
from hybrid_jax.measure.profile import PhaseProfile, measure_profile
from hybrid_jax.measure.requests import RequestTimes, percentiles
from hybrid_jax.measure.state_norms import record_state_norms
from hybrid_jax.measure.subject import describe, describe_process, open_runner
from hybrid_jax.measure.throughput import Throughput, measure_throughput
from pallas_kernels.bench import (
    OPS,
    TIMING_HEADER,
    Timing,
    time_op,
    timing_lines,
    timing_report,
)

__all__ = [
    "OPS",
    "TIMING_HEADER",
    "Latency",
    "PhaseProfile",
    "RequestTimes",
    "Throughput",
    "Timing",
    "describe",
    "describe_process",
    "measure_latency",
    "measure_profile",
    "measure_throughput",
    "open_runner",
    "percentiles",
    "record_state_norms",
    "time_op",
    "timing_lines",
    "timing_report",
]
