"""Locally typical sampling (Meister et al. 2022, arXiv:2202.00666), as a logits processor.

llm = LLM(path, logits_processors={"typical": typical(0.9)})
params = SamplingParams(logits_processors=("typical",))
"""

import jax
import jax.numpy as jnp

from hybrid_jax.fields import number
from hybrid_jax.runtime.sampling import LogitsContext, LogitsProcessor


def typical(mass: float) -> LogitsProcessor:
    """Keeps the tokens whose surprise is closest to the entropy, until they have `mass`.

    The token that reaches the mass is kept, and ties with it. The processor sees logits before the
    temperature.

    Raises:
        ValueError: `mass` is not in (0, 1].
    """
    share = number(0.0, 1.0, "the paper uses 0.2 to 0.95", above=True)("mass", mass)

    def process(logits: jax.Array, context: LogitsContext) -> jax.Array:
        del context
        logp = jax.nn.log_softmax(logits, axis=-1)
        p = jnp.exp(logp)
        # 0 log 0 is 0: what an earlier processor has excluded has no part in the entropy.
        entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0.0), axis=-1, keepdims=True)
        distance = jnp.abs(-logp - entropy)
        order = jnp.argsort(distance, axis=-1)
        reached = jnp.cumsum(jnp.take_along_axis(p, order, axis=-1), axis=-1)
        last = jnp.sum(reached < share, axis=-1, keepdims=True)
        last = jnp.minimum(last, logits.shape[-1] - 1)
        furthest = jnp.take_along_axis(jnp.take_along_axis(distance, order, -1), last, -1)
        return jnp.where(distance <= furthest, logits, -jnp.inf)

    return process
