"""What a check found, and how much two computations of the same numbers may differ."""

import math
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "warn", "fail"]

# Relative to the norm, after one layer; it grows with the root of the depth, as a random walk does.
# float32: sums of hundreds of terms in another order; Gemma-3-270M, 18 layers, differs from
# transformers by 3e-5 at most. The others round about 16 times a layer: 4 units of 2^-11 or 2^-8,
# and twice as much because the layers amplify it; Gemma-3-270M needs half of that.
_ONE_LAYER = {"float32": 5e-5, "float16": 8 * 2.0**-11, "bfloat16": 8 * 2.0**-8}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    figure: float
    bound: float  # the figure may be as large
    detail: str  # what the figure is, and where to look if it is too large


def verdict(figure: float, bound: float) -> Verdict:
    """Whether the figure keeps the bound; NaN does not."""
    return "pass" if figure <= bound else "fail"


def tolerance(dtype: str, num_layers: int) -> float:
    """The largest difference, relative to the norm, that rounding explains after so many layers."""
    return _ONE_LAYER[dtype] * math.sqrt(max(num_layers, 1))


def tie_margin(dtype: str, num_layers: int) -> float:
    """Logits this close, in their deviations, may change places: each may move by the tolerance."""
    return 2 * tolerance(dtype, num_layers)


def coarser(one: str, other: str) -> str:
    """Of two dtypes the one that rounds more."""
    return max(one, other, key=_ONE_LAYER.__getitem__)
