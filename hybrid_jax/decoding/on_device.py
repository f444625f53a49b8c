"""Many tokens in one dispatch: the compiled step inside a loop that runs on the device.

An example of research code on the functional level (`hybrid_jax.functional`). The host is not asked
between tokens, so that a step costs no dispatch; the price is that nothing else runs meanwhile, and
that pages are there beforehand (`functional.sequence_batch` gives a sequence all of its own).
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from hybrid_jax.functional import Step
from hybrid_jax.runtime.batch import Carry, StepBatch
from hybrid_jax.runtime.sampling import SamplingTable

Decode = Callable[[Carry, StepBatch, SamplingTable, jax.Array], tuple[jax.Array, jax.Array, Carry]]


def make_decode(step: Step, most: int) -> Decode:
    """Compiles a loop of at most `most` decode steps of one sequence.

    `step` comes from `functional.make_step(..., jit=False)`.
    The function takes (carry, batch, sampling, stop_ids i32[E]). `batch` is a decode batch of
    `functional.sequence_batch`, whose `reach` covers the last token. It returns the tokens
    i32[most], how many of them there are (a stop token is the last one), and the carry.
    """

    def decode(
        carry: Carry, batch: StepBatch, sampling: SamplingTable, stop_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array, Carry]:
        def goes_on(loop: tuple[jax.Array, jax.Array, jax.Array, Carry]) -> jax.Array:
            count, last, _, _ = loop
            return (count < most) & ((count == 0) | ~jnp.any(last == stop_ids))

        def one(
            loop: tuple[jax.Array, jax.Array, jax.Array, Carry],
        ) -> tuple[jax.Array, jax.Array, jax.Array, Carry]:
            count, last, tokens, carry = loop
            here = replace(
                batch,
                token_ids=batch.token_ids.at[0].set(last),
                positions=batch.positions.at[0].add(count),
                seq_lens=batch.seq_lens.at[0].add(count),
            )
            output, carry = step(carry, here, sampling)
            token = output.tokens[0]
            return count + 1, token, tokens.at[count].set(token), carry

        start = (jnp.int32(0), batch.token_ids[0], jnp.zeros(most, jnp.int32), carry)
        count, _, tokens, carry = lax.while_loop(goes_on, one, start)
        return tokens, count, carry

    return jax.jit(decode, donate_argnums=0)
