"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), with decays per head or channel."""

from pallas_kernels.gated_delta_rule.api import gated_delta_rule
from pallas_kernels.gated_delta_rule.reference import chunked, recurrent

__all__ = ["chunked", "gated_delta_rule", "recurrent"]
