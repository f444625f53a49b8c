"""Gated linear attention: decay per head (lightning, retention) or per key channel (GLA)."""

from pallas_kernels.gla.api import gla
from pallas_kernels.gla.reference import chunked, recurrent

__all__ = ["chunked", "gla", "recurrent"]
