"""Output quality: against a reference, and against what must hold of any engine.

>>> from hybrid_jax.bundled import bundled_model
>>> from hybrid_jax.checking import check_model
>>> report = check_model(bundled_model(), num_tokens=8, long_tokens=100)
>>> report.failed
False
>>> [finding.check for finding in report.findings][:2]
['isolation', 'decode against prefill']
"""

from hybrid_jax.checking.check import CheckReport as CheckReport
from hybrid_jax.checking.check import check_model as check_model
from hybrid_jax.checking.compare import LayerError as LayerError
from hybrid_jax.checking.findings import Finding as Finding
from hybrid_jax.checking.recording import record_reference as record_reference
from hybrid_jax.checking.reference import RecordedPrompt as RecordedPrompt
from hybrid_jax.checking.reference import Reference as Reference
