"""Contrastive decoding (Li et al. 2022, arXiv:2210.15097): what an expert likes and an amateur not.

The result is decoded as a session is:

    generate(Contrastive(expert, amateur), SamplingParams(temperature=0.0))
"""

import math
from dataclasses import dataclass

import numpy as np

from hybrid_jax.decoding.sampling import log_softmax
from hybrid_jax.decoding.session import Session
from hybrid_jax.fields import number


@dataclass
class Contrastive:
    """log p_expert - log p_amateur, where p_expert is at least `alpha` of its largest value.

    Both sessions have been fed the same tokens, by two models with one vocabulary.

    Raises:
        ValueError: `alpha` is not in (0, 1].
    """

    expert: Session
    amateur: Session
    alpha: float = 0.1

    def __post_init__(self) -> None:
        self.alpha = number(0.0, 1.0, "the paper uses 0.1", above=True)("alpha", self.alpha)

    @property
    def token_ids(self) -> list[int]:
        """All tokens fed."""
        return self.expert.token_ids

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The expert's."""
        return self.expert.stop_ids

    @property
    def next_logits(self) -> np.ndarray:
        """f32[V]: the contrast, -inf where the expert finds a token implausible."""
        expert = log_softmax(self.expert.next_logits)
        amateur = log_softmax(self.amateur.next_logits)
        plausible = expert >= math.log(self.alpha) + expert.max()
        return np.where(plausible, expert - amateur, -np.inf)

    def decode(self, token_id: int) -> np.ndarray:
        """Feeds both."""
        self.expert.decode(token_id)
        self.amateur.decode(token_id)
        return self.next_logits
