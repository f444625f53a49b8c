"""What must hold of any engine: batching, chunks, turns and seeds leave a text as it is.

Greedy texts are held against logits that a session computes of them anew, in one go: every token
must be the most likely one, and its log probability the same. Where two tokens are as good as
equally likely, rounding decides, and either is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid_jax.checking.compare import tokens_finding
from hybrid_jax.checking.findings import Finding, verdict
from hybrid_jax.checking.subject import CHUNK, Subject
from hybrid_jax.decoding import Workspace
from hybrid_jax.decoding.sampling import log_softmax
from hybrid_jax.llm import LLM, RequestOutput
from hybrid_jax.sampling_params import SamplingParams

TokenIds = list[int]

NGRAM = 4
LOOPS = 0.5  # of the n-grams of a text are repetitions: prose has a few per cent, a loop nearly all


@dataclass(frozen=True)
class Text:
    """What an engine made of a prompt."""

    prompt: TokenIds
    tokens: TokenIds
    logprobs: list[float]  # of `tokens`


def check_isolation(
    subject: Subject, prompts: Sequence[TokenIds], num_tokens: int
) -> tuple[list[Finding], list[TokenIds]]:
    """Each prompt alone, then all in one batch. Returns the greedy tokens of the former, too."""
    params = _greedy(num_tokens)
    with subject.open_llm() as llm:
        alone = [text for prompt in prompts for text in _texts(llm, [prompt], params)]
    with subject.open_llm() as llm:
        batched = _texts(llm, prompts, params)
    different = ties = 0
    for one, other in zip(alone, batched, strict=True):
        if one.tokens != other.tokens:
            tie = _fork_at_tie(subject, one, other)
            ties, different = ties + tie, different + (not tie)
    detail = f"{different} of {len(prompts)} texts change with their batch"
    if ties:
        detail += f"; {ties} go another way at a tie within rounding"
    findings = [
        Finding("isolation", verdict(different, 0), different, 0, detail),
        _anew(subject, "decode against prefill", alone, " when computed anew in one go"),
    ]
    return findings, [text.tokens for text in alone]


def check_repetition(
    texts: Sequence[TokenIds], reference: Sequence[TokenIds] | None, stop_ids: Sequence[int]
) -> Finding:
    """Which greedy texts go round in circles, and whether the reference's do so, too.

    A model may loop of its own accord: without a reference that is a warning.
    """
    shares = [repeated_share(_until_stop(text, stop_ids)) for text in texts]
    loops = [share > LOOPS for share in shares]
    detail = (
        f"{sum(loops)} of {len(texts)} texts loop; {max(shares):.0%} of the {NGRAM}-grams of the "
        "worst are repetitions"
    )
    if reference is None:
        word = "warn" if any(loops) else "pass"
        return Finding("repetition", word, sum(loops), 0, detail)
    theirs = [repeated_share(_until_stop(text, stop_ids)) > LOOPS for text in reference]
    extra = sum(ours and not their for ours, their in zip(loops, theirs, strict=False))
    detail += f"; {sum(theirs)} of the reference's do"
    return Finding("repetition", verdict(extra, 0), extra, 0, detail)


def check_long_prompt(subject: Subject, prompt: TokenIds, num_tokens: int) -> Finding:
    """A prompt of many chunks, longer than the window, against the same prompt in one go."""
    with subject.open_llm() as llm:
        texts = _texts(llm, [prompt], _greedy(num_tokens))
    more = f" after {len(prompt):,} tokens in chunks of {CHUNK}"
    return _anew(subject, "long prompt", texts, more)


def check_turns(subject: Subject, turns: Sequence[TokenIds], num_tokens: int) -> list[Finding]:
    """A conversation, in a session and by its cached prefix, against each turn computed anew."""
    params = _greedy(num_tokens)
    with subject.open_llm() as llm, llm.session() as session:
        texts = [_text(session.generate(turn, params)) for turn in turns]
    findings = [_anew(subject, "turns of a session", texts)]
    history: TokenIds = []
    texts, hits = [], []
    with subject.open_llm() as llm:
        for turn in turns:
            (output,) = llm.generate([[*history, *turn]], params, use_tqdm=False)
            texts.append(_text(output))
            history = texts[-1].prompt + texts[-1].tokens
            report = output.outputs[0].cache
            hits.append(0 if report is None else report.cached_tokens)
    more = f" ({', '.join(map(str, hits))} tokens of the turns' prompts were found)"
    found = _anew(subject, "turns by prefix cache", texts, more)
    if not any(hits):
        found = replace(
            found, verdict="fail", detail=f"no turn finds the one before; {found.detail}"
        )
    return [*findings, found]


def check_seed(
    subject: Subject, prompts: Sequence[TokenIds], num_tokens: int, seed: int
) -> Finding:
    """The first prompt, sampled: the same seed is the same text, in any batch; another is not."""

    def sampled(number: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0, seed=number, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )

    first, others = prompts[0], prompts[2:]
    with subject.open_llm() as llm:
        alone, again = (_texts(llm, [first], sampled(seed))[0].tokens for _ in range(2))
    with subject.open_llm() as llm:
        rest = [sampled(seed + 2 + i) for i in range(len(others))]
        batch = [sampled(seed), sampled(seed + 1), *rest]
        same, other, *_ = [t.tokens for t in _texts(llm, [first, first, *others], batch)]
    broken = {
        "the same seed gives another text": alone != again,
        "and another one in a batch": alone != same,
        f"seeds {seed} and {seed + 1} give the same text": same == other,
    }
    words = [text for text, wrong in broken.items() if wrong]
    detail = "; ".join(words) or "the same seed is the same text, alone and batched; another is not"
    return Finding("seed", verdict(len(words), 0), len(words), 0, detail)


def _anew(subject: Subject, check: str, texts: Sequence[Text], more: str = "") -> Finding:
    """The texts against logits computed in one go."""
    gaps, errors = [], []
    for text in texts:
        below, logprobs, std = _recompute(subject.space, text)
        gaps += (below / std).tolist()
        errors += (np.abs(logprobs - text.logprobs) / std).tolist()
    return tokens_finding(check, gaps, subject.tie_margin, logprob_errors=errors, more=more)


def _fork_at_tie(subject: Subject, one: Text, other: Text) -> bool:
    """Whether both tokens where the texts part are as likely as any other."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    end = next(i for i, (a, b) in enumerate(pairs) if a != b) + 1
    gaps = []
    for text in (one, other):
        below, _, std = _recompute(subject.space, replace(text, tokens=text.tokens[:end]))
        gaps.append(below[-1] / std[-1])
    return max(gaps) <= subject.tie_margin


def _recompute(space: Workspace, text: Text) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token: how far its logit is below the largest, its log probability, and the standard
    deviation of the logits; f32[tokens] each."""
    with space.session() as session:
        logits = session.prefill(text.prompt)[None]
        if len(text.tokens) > 1:
            logits = np.concatenate([logits, session.logits(text.tokens[:-1])])
    everything = log_softmax(logits)
    logprobs = np.take_along_axis(everything, np.asarray(text.tokens)[:, None], axis=-1)[:, 0]
    return everything.max(axis=-1) - logprobs, logprobs, logits.std(axis=-1)


def repeated_share(text: Sequence[int]) -> float:
    """The share of a text's n-grams that it has had before."""
    grams = [tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _until_stop(text: TokenIds, stop_ids: Sequence[int]) -> TokenIds:
    """What the model would have said: it is not asked for what follows the end."""
    return text[: next((i for i, token in enumerate(text) if token in stop_ids), len(text))]


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0
    )


def _texts(
    llm: LLM, prompts: Sequence[TokenIds], params: SamplingParams | Sequence[SamplingParams]
) -> list[Text]:
    return [_text(output) for output in llm.generate(list(prompts), params, use_tqdm=False)]


def _text(output: RequestOutput) -> Text:
    """Raises what ended the completion, unless it came to its end."""
    (completion,) = output.outputs
    if completion.error is not None:
        raise completion.error
    logprobs = [token.logprob for token in completion.logprobs or ()]
    return Text(output.prompt_token_ids, completion.token_ids, logprobs)
