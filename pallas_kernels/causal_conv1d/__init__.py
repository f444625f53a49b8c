"""Depthwise causal convolution over time, with its last inputs kept per sequence."""

from pallas_kernels.causal_conv1d.api import causal_conv1d, state_shape
from pallas_kernels.causal_conv1d.reference import dense

__all__ = ["causal_conv1d", "dense", "state_shape"]
