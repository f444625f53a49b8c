"""Classifier-free guidance (Sanchez et al. 2023, arXiv:2306.17806): away from another prompt.

The result is decoded as a session is:

    generate(Guided(session, without_the_instruction, scale=1.5), params)
"""

from dataclasses import dataclass

import numpy as np

from hybrid_jax.decoding.sampling import log_softmax
from hybrid_jax.decoding.session import Session


@dataclass
class Guided:
    """log p_unconditional + scale * (log p_conditional - log p_unconditional).

    Two sessions of one workspace that differ in their prompts and go on with the same tokens; they
    run in one step. Scale 1 is the conditional session alone.
    """

    conditional: Session
    unconditional: Session
    scale: float = 1.5

    @property
    def token_ids(self) -> list[int]:
        """The tokens fed to the conditional session."""
        return self.conditional.token_ids

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The model's."""
        return self.conditional.stop_ids

    @property
    def next_logits(self) -> np.ndarray:
        """f32[V]: the guided log probabilities, not normalised."""
        with_, without = (
            log_softmax(session.next_logits) for session in (self.conditional, self.unconditional)
        )
        return without + np.float32(self.scale) * (with_ - without)

    def decode(self, token_id: int) -> np.ndarray:
        """Feeds both."""
        both = [self.conditional, self.unconditional]
        self.conditional.workspace.decode(both, [token_id, token_id])
        return self.next_logits
