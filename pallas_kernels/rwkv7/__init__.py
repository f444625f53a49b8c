"""RWKV-7's recurrence: decay per channel plus a rank-one update of the state's transition."""

from pallas_kernels.rwkv7.api import rwkv7
from pallas_kernels.rwkv7.reference import recurrent

__all__ = ["recurrent", "rwkv7"]
