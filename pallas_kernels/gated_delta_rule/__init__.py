"""The gated delta rule with one decay per value head (Yang et al. 2024, arXiv:2412.06464)."""

from pallas_kernels.gated_delta_rule.api import gated_delta_rule
from pallas_kernels.gated_delta_rule.reference import chunked, recurrent

__all__ = ["chunked", "gated_delta_rule", "recurrent"]
