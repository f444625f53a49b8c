"""Diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424), with Hamming diversity."""

from collections.abc import Iterable

import numpy as np

from hybrid_jax.decoding.beam import BeamGroup, Hypothesis, advance
from hybrid_jax.decoding.session import Session
from hybrid_jax.errors import InvalidRequest


def diverse_beam_search(
    session: Session,
    *,
    num_beams: int = 4,
    num_groups: int = 2,
    diversity: float = 0.5,
    max_tokens: int = 16,
    length_penalty: float = 1.0,
    stop_ids: Iterable[int] | None = None,
) -> list[list[Hypothesis]]:
    """Beam searches in groups that avoid each other's tokens.

    In every step the groups choose one after the other. For each beam of an earlier group that has
    just chosen a token, the token is `diversity` less likely (in log probability) to be chosen.
    Scores are those of the model, as in `beam_search`, which says what the other arguments are.

    Returns:
        Per group its hypotheses, best first.

    Raises:
        InvalidRequest: the beams cannot be shared out to the groups.
    """
    if num_groups < 1 or num_beams % num_groups:
        raise InvalidRequest(
            f"{num_beams} beams cannot be shared out to {num_groups} groups; use a multiple"
        )
    groups = [
        BeamGroup(
            session,
            num_beams // num_groups,
            stop_ids=stop_ids,
            length_penalty=length_penalty,
            early_stopping=False,
        )
        for _ in range(num_groups)
    ]
    for length in range(1, max_tokens + 1):
        chosen = np.zeros(session.workspace.model_config.vocab_size, np.float32)
        for group in groups:
            if not group.running:
                continue
            for token in group.choose(last=length == max_tokens, penalty=diversity * chosen):
                chosen[token] += 1
        advance(groups)
    return [group.done for group in groups]
