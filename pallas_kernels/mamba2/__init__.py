"""A Mamba-2 mixer between its projections: convolution, step sizes and recurrence in one op."""

from pallas_kernels.mamba2.api import mamba2
from pallas_kernels.mamba2.operands import States, Weights
from pallas_kernels.mamba2.reference import split

__all__ = ["States", "Weights", "mamba2", "split"]
