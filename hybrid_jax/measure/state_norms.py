"""How large the recurrent states of a sequence grow while it decodes."""

import numpy as np

from hybrid_jax.decoding.session import Session


def record_state_norms(session: Session, steps: int) -> dict[int, list[float]]:
    """Decodes greedily and takes the norm of every linear layer's state after each step.

    Args:
        session: has been fed a prompt; it goes on from there.
        steps: tokens to decode.

    Returns:
        Frobenius norms of the recurrent state, all heads together, by layer.

    Raises:
        InvalidRequest: nothing was fed yet, or the sequence becomes too long.
    """
    layers = session.workspace.model_config.layers
    norms = {i: list[float]() for i, layer in enumerate(layers) if layer.kind == "linear"}
    for _ in range(steps):
        session.decode(int(np.argmax(session.next_logits)))
        for layer, values in norms.items():
            state = session.state(layer)["recurrent"].astype(np.float64)
            values.append(float(np.linalg.norm(state)))
    return norms
