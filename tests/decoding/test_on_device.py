"""The loop on the device gives the tokens of a loop on the host."""

from collections.abc import Callable

import jax.numpy as jnp
import pytest

from hybrid_jax import functional as F
from hybrid_jax.decoding.on_device import make_decode
from hybrid_jax.loading import LoadedModel
from tests.helpers.real_engine import Oracle, engine_config, random_prompt

PROMPT = random_prompt(13, 5)
MOST = 12


def test_many_tokens_in_one_dispatch(
    models: Callable[[str], LoadedModel], oracles: Callable[[str], Oracle]
) -> None:
    """Also ended by a stop token, and gone on from where it ended."""
    model = models("lara_mini")
    config = engine_config(max_num_seqs=1, row_buckets=(1,)).resolve(model.config)
    plan = F.plan_caches(model.config, config, model.dtype)
    step, sampling = F.make_step(model, plan, config), F.greedy(config)
    decode = make_decode(F.make_step(model, plan, config, jit=False), MOST)
    wanted = oracles("lara_mini")(PROMPT, MOST + 1)

    def run(stop_ids: list[int]) -> tuple[list[int], int]:
        carry = F.init_carry(plan, config)
        batch = F.sequence_batch(plan, config, PROMPT, start=0, prefill=True)
        output, carry = step(carry, batch, sampling)
        first, new = int(output.tokens[0]), list[int]()
        calls = 0
        while len(new) < MOST:
            start = len(PROMPT) + len(new)
            batch = F.sequence_batch(
                plan, config, [new[-1] if new else first], start=start, reach=start + MOST
            )
            tokens, count, carry = decode(carry, batch, sampling, jnp.array(stop_ids))
            new += tokens[: int(count)].tolist()
            calls += 1
        return [first, *new], calls

    assert run([-1]) == (wanted, 1)
    stop = next(t for t in wanted[3:8] if t not in wanted[1:3])
    tokens, calls = run([stop])
    assert tokens[: MOST + 1] == wanted and calls > 1
    with pytest.raises(ValueError, match="reach 65"):
        F.sequence_batch(plan, config, [1], start=3, reach=65)
