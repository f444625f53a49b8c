"""Operations of hybrid-attention models, one package per op, one kernel per (op, implementation).

`registry` chooses an implementation from static facts and reports every choice. This package knows
arrays and devices; it knows nothing of models, layers or requests.
"""

from pallas_kernels.ragged import RaggedBatch
from pallas_kernels.registry import report

__all__ = ["RaggedBatch", "report"]
