"""A gated delta net between its projections: convolution, gates and gated delta rule in one op."""

from pallas_kernels.gated_delta_net.api import gated_delta_net
from pallas_kernels.gated_delta_net.operands import States, Weights
from pallas_kernels.gated_delta_net.reference import gates, split

__all__ = ["States", "Weights", "gated_delta_net", "gates", "split"]
