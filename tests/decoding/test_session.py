"""Sessions against the oracle, which has no cache: logits, forks, rewinds, surgery, snapshots."""

import os
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.decoding import Session, generate
from hybrid_jax.errors import CachesFull, CannotRewind, InvalidRequest, SnapshotError
from hybrid_jax.generate import dense_logits
from hybrid_jax.loading import LoadedModel
from tests.decoding.conftest import GetWorkspace
from tests.helpers.real_engine import random_prompt

# lara_mini has all three kinds of layers; gemma3 no state; olmo_hybrid another layout and decay.
NAMES = [
    "lara_mini",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "olmo_hybrid")),
]
SEED = int(os.environ.get("HYBRID_JAX_TEST_SEED") or int.from_bytes(os.urandom(3)))
# Both sides compute in float32 but sum in other orders; logits are of order one to ten.
TOLERANCE = 2e-4

Models = Callable[[str], LoadedModel]


def expected(model: LoadedModel, token_ids: list[int]) -> np.ndarray:
    return np.asarray(dense_logits(model, token_ids))


def close(actual: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(actual - wanted).max() <= TOLERANCE * wanted.std())


def tokens(length: int, seed: int) -> list[int]:
    return list(random_prompt(length, SEED + seed))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_oracles(name: str, workspace: GetWorkspace, models: Models) -> None:
    """Prefill in chunks of several steps, decode, all logits, verify: every token's logits."""
    ids = tokens(60, 0)
    wanted = expected(models(name), ids)
    with workspace(name).session() as session:
        assert close(session.prefill(ids[:41]), wanted[40])
        for i in range(41, 44):
            assert close(session.decode(ids[i]), wanted[i])
        assert close(session.verify(ids[44:47]), wanted[44:47])
        assert close(session.logits(ids[47:58]), wanted[47:58])
        assert close(session.decode(ids[58]), wanted[58])
        assert close(session.next_logits, wanted[58])
        assert session.token_ids == ids[:59] and len(session) == 59


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_prompts_as_short_as_the_convolution(
    length: int, workspace: GetWorkspace, models: Models
) -> None:
    ids = tokens(length + 4, length)
    wanted = expected(models("lara_mini"), ids)
    with workspace("lara_mini").session() as session:
        assert close(session.prefill(ids[:length]), wanted[length - 1])
        assert close(session.verify(ids[length : length + 3]), wanted[length : length + 3])
        session.rewind(2)
        assert close(session.decode(ids[length + 1]), wanted[length + 1])


def test_many_sessions_in_one_step(workspace: GetWorkspace, models: Models) -> None:
    space = workspace("lara_mini")
    ids = [tokens(n + 3, n) for n in (1, 7, 17, 30)]
    sessions = [space.session() for _ in ids]
    for session, row in zip(sessions, ids, strict=True):
        session.prefill(row[:-3])
    decoded = space.decode(sessions, [row[-3] for row in ids])
    verified = space.verify(sessions, [row[-2:] for row in ids])
    for i, row in enumerate(ids):
        wanted = expected(models("lara_mini"), row)
        assert close(decoded[i], wanted[-3])
        assert close(verified[i], wanted[-2:])


@pytest.mark.parametrize("name", NAMES)
def test_forks_share_the_past_and_nothing_else(
    name: str, workspace: GetWorkspace, models: Models
) -> None:
    space = workspace(name)
    trunk = space.session()
    ids = tokens(13, 1)
    trunk.prefill(ids)
    used = [pool.num_used for pool in space.memory.pools]
    branches = [*trunk.fork(3), trunk]
    assert [pool.num_used for pool in space.memory.pools] == used  # no memory, no copy
    ends = [tokens(5, 10 + i) for i in range(4)]
    for position in range(5):
        logits = space.decode(branches, [end[position] for end in ends])
        for branch, end, row in zip(branches, ends, logits, strict=True):
            assert branch.token_ids == ids + end[: position + 1]
            assert close(row, expected(models(name), ids + end)[13 + position])


def test_hidden_states_are_what_the_layers_make(workspace: GetWorkspace, models: Models) -> None:
    """The last ones give the logits, and the first ones are the embeddings."""
    from hybrid_jax.models.decoder import bind

    model = models("lara_mini")
    decoder, ids = bind(model.graph, model.params), tokens(37, 2)
    depth = len(model.config.layers)
    with workspace("lara_mini").session() as session:
        hidden = session.hidden_states(ids, layers=(0, 2, depth))
        assert hidden.shape == (3, 37, model.config.hidden_size)
        assert close(np.asarray(decoder.logits(hidden[2])), expected(model, ids))
        assert np.array_equal(hidden[0], np.asarray(decoder._embed(np.array(ids))))
        assert not close(hidden[1], hidden[0])
        with pytest.raises(InvalidRequest, match=rf"layers must lie in \[0, {depth}\], got \[9\]"):
            session.hidden_states([1], layers=[9])


@pytest.mark.parametrize("name", NAMES)
def test_rewinding(name: str, workspace: GetWorkspace, models: Models) -> None:
    """To a checkpoint, within a verification, to the beginning; and on along another way."""
    model, ids = models(name), tokens(30, 3)
    with workspace(name).session() as session:
        session.prefill(ids[:11])
        session.checkpoint()
        session.prefill(ids[11:29])
        session.rewind(18)
        assert session.token_ids == ids[:11]
        assert close(session.next_logits, expected(model, ids)[10])
        other = ids[:11] + tokens(6, 4)
        assert close(session.prefill(other[11:14]), expected(model, other)[13])
        session.verify(other[14:17])
        for back, taken in ((1, 15), (1, 14), (0, 14)):
            session.rewind(back)
            assert close(session.next_logits, expected(model, other)[taken])
        session.rewind(len(session))
        assert close(session.prefill(ids), expected(model, ids)[-1])


def test_where_it_cannot_go_back(workspace: GetWorkspace) -> None:
    with workspace("lara_mini").session() as session:
        session.prefill(tokens(9, 5))
        session.checkpoint()
        session.prefill(tokens(3, 6))
        with pytest.raises(
            CannotRewind, match=r"back to 10 tokens: .* kept at \[9\] only; call ch"
        ):
            session.rewind(2)
        with pytest.raises(InvalidRequest, match="cannot take 13 of 12 tokens back"):
            session.rewind(13)
        assert len(session) == 12
    with workspace("gemma3").session() as session:  # windows of 8 tokens
        session.prefill(tokens(30, 7))
        session.rewind(1)
        with pytest.raises(CannotRewind, match="pages that the window of cache group 0 saw"):
            session.rewind(20)


def test_random_walks(workspace: GetWorkspace, models: Models) -> None:
    """Feeds, forks, checkpoints, rewinds and closes in any order; the oracle agrees with all."""
    space, rng = workspace("lara_mini"), random.Random(SEED)
    sessions: list[Session] = [space.session()]
    for _ in range(60):
        session = rng.choice(sessions)
        what = rng.choice(["prefill", "decode", "verify", "fork", "checkpoint", "rewind", "close"])
        room = 56 - len(session)
        if what == "prefill" and room > 0:
            session.prefill(tokens(rng.randint(1, min(room, 20)), rng.randrange(9)))
        elif what == "decode" and room > 0:
            session.decode(rng.randrange(128))
        elif what == "verify" and room > 0:
            session.verify(tokens(3, rng.randrange(9)))
            session.rewind(rng.randint(0, 2))
        elif what == "fork" and len(sessions) < 4:
            sessions += session.fork(1)
        elif what == "checkpoint" and len(session.memory.checkpoints) < 3:
            session.checkpoint()
        elif what == "rewind" and session.memory.checkpoints:
            session.rewind(len(session) - rng.choice(sorted(session.memory.checkpoints)))
        elif what == "close" and len(sessions) > 1:
            sessions.remove(session)
            session.close()
            continue
        if session.token_ids:
            wanted = expected(models("lara_mini"), session.token_ids)[-1]
            assert close(session.next_logits, wanted), f"HYBRID_JAX_TEST_SEED={SEED}"


@pytest.mark.parametrize("name", NAMES[:2])
def test_surgery(name: str, workspace: GetWorkspace) -> None:
    """What one session remembers, put into another, makes that one go on like the first."""
    space = workspace(name)
    kinds = [spec.kind for spec in space.model_config.layers]
    first, second = space.session(), space.session()
    first.prefill(tokens(21, 8))
    second.prefill(tokens(21, 9))
    (fork,) = second.fork(1)
    before = second.next_logits
    for layer, kind in enumerate(kinds):
        if kind == "linear":
            second.set_state(layer, **first.state(layer))
        else:
            start, keys, values = first.kv(layer)
            assert start == (0 if kind == "full" else 21 - 8 + 1) and len(keys) == 21 - start
            second.set_kv(layer, keys, values)
    assert np.array_equal(second.next_logits, before)  # only what follows is changed
    logits = [session.decode(7) for session in (first, second, fork)]
    assert np.array_equal(logits[0], logits[1])
    assert not close(logits[2], logits[0])
    fresh = space.session()
    fresh.prefill(tokens(21, 9))
    assert np.array_equal(fresh.decode(7), logits[2])  # the fork kept what it had


def test_what_surgery_refuses(workspace: GetWorkspace) -> None:
    session = workspace("lara_mini").session()
    with pytest.raises(InvalidRequest, match="remembers nothing yet"):
        session.state(0)
    session.prefill([1, 2, 3])
    with pytest.raises(InvalidRequest, match="layer 1 has no state; the layers are"):
        session.state(1)
    with pytest.raises(InvalidRequest, match="layer 0 has no keys and values"):
        session.kv(0)
    with pytest.raises(InvalidRequest, match=r"recurrent \(2,\) is no state of layer 0"):
        session.set_state(0, recurrent=np.zeros(2))
    with pytest.raises(InvalidRequest, match=r"keys and values of layer 1 are \(3, 2, 16\) each"):
        session.set_kv(1, np.zeros(2), np.zeros(2))


@pytest.mark.parametrize("name", NAMES)
def test_snapshots(name: str, workspace: GetWorkspace, models: Models) -> None:
    space = workspace(name)
    ids = tokens(29, 11)
    with space.session() as session:
        session.prefill(ids[:27])
        snapshot = session.snapshot()
        session.prefill(ids[1:5])  # the snapshot is a copy
    with space.restore(snapshot) as restored:
        assert restored.token_ids == ids[:27]
        with pytest.raises(InvalidRequest, match="not known here; feed a token first"):
            _ = restored.next_logits
        assert close(restored.prefill(ids[27:]), expected(models(name), ids)[-1])
        other = workspace("qwen3")
        with pytest.raises(SnapshotError, match="other weights"):
            other.restore(snapshot)
        with pytest.raises(SnapshotError, match="feed tokens before"):
            other.session().snapshot()
    for name, array in snapshot.arrays.items():
        with pytest.raises(SnapshotError, match="it is damaged, make it again"):
            space.restore(replace(snapshot, arrays={**snapshot.arrays, name: array[..., :-1]}))


@pytest.mark.slow
def test_the_same_as_serving(workspace: GetWorkspace, models: Models) -> None:
    """Samples of `LLM.generate`; snapshots of `LLM.session` and back, over other buckets."""
    space, known = workspace("lara_mini"), tokens(9, 12)
    params = SamplingParams(
        temperature=0.9, top_p=0.9, min_p=0.01, presence_penalty=0.5, seed=SEED, max_tokens=12
    )
    with LLM(models("lara_mini").source, dtype="float32", page_size=4, max_model_len=64,
             max_num_seqs=1, max_num_batched_tokens=16, cache_bytes=2**30) as llm:  # fmt: skip
        (output,) = llm.generate([known], params, use_tqdm=False)
        with space.session() as session:
            session.prefill(known)
            assert generate(session, params) == output.outputs[0].token_ids
        with llm.session() as talk:
            talk.generate(known, params)
            snapshot, known = talk.snapshot(), list(talk.token_ids)
        session = space.restore(snapshot)
        logits = session.prefill(known[len(session) :])
        assert close(logits, expected(models("lara_mini"), known)[-1])
        with llm.session(session.snapshot()) as talk:
            more = talk.generate([5], params)
            assert more.outputs[0].cache is not None
            assert more.outputs[0].cache.cached_tokens == len(known)


def test_no_compiles_in_steady_state(workspace: GetWorkspace) -> None:
    """Whatever lengths and rows, a bucket compiles once."""
    space = workspace("lara_mini")

    def use(lengths: list[int]) -> None:
        sessions = [space.session() for _ in lengths]
        for session, length in zip(sessions, lengths, strict=True):
            session.prefill(tokens(length, 0))
        space.decode(sessions, [1] * len(sessions))
        space.verify(sessions, [[1, 2, 3]] * len(sessions))
        sessions[0].decode(3)

    use([3, 20])
    compiles = space.num_compiles
    use([1, 31, 45, 16])
    assert space.num_compiles == compiles


def test_bad_input(workspace: GetWorkspace) -> None:
    space = workspace("lara_mini")
    session = space.session()
    for call, message in (
        (lambda: session.prefill([]), "no tokens were given"),
        (lambda: session.prefill([128]), "token id 128 is outside the vocabulary of 128"),
        (lambda: session.prefill("hello"), "'h' is no token id"),  # type: ignore[arg-type]
        (lambda: session.prefill([1, True]), "True is no token id"),
        (lambda: session.prefill([1] * 65), "longer than max_model_len 64"),
        (lambda: space.decode([session, session], [1, 2]), "each once"),
        (lambda: space.verify([session], [[]]), "at least one"),
        (lambda: space.decode([space.session() for _ in range(6)], [1] * 6), "max_num_seqs 5"),
        (lambda: session.next_logits, "feed a token first"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            call()
    assert not session.token_ids
    session.close()
    session.close()
    with pytest.raises(InvalidRequest, match="the session is closed"):
        session.decode(1)


def test_full_caches_change_nothing(workspace: GetWorkspace, models: Models) -> None:
    space, ids = workspace("lara_mini"), tokens(12, 13)
    session = space.session()
    session.prefill(ids[:10])
    others = []
    with pytest.raises(CachesFull, match="close sessions or give the workspace more"):
        for _ in range(100):
            others.append(space.session())
            others[-1].prefill(tokens(40, 0))
            others[-1].checkpoint()
    (fork,) = session.fork(1)
    with pytest.raises(CachesFull):
        space.verify([session, fork], [ids[10:12] * 8] * 2)
    for other in others:
        other.close()
    assert close(session.prefill(ids[10:]), expected(models("lara_mini"), ids)[-1])
