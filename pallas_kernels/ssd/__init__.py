"""The state space dual form of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060)."""

from pallas_kernels.ssd.api import ssd
from pallas_kernels.ssd.reference import chunked, recurrent

__all__ = ["chunked", "recurrent", "ssd"]
