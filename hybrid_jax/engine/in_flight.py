"""A launched step: what the host must remember of it, and what it reads when the step is done."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybrid_jax.engine.scheduler import Schedule
from hybrid_jax.engine.types import Sequence, TokenLogprob

if TYPE_CHECKING:
    from hybrid_jax.runtime.batch import StepOutput
    from hybrid_jax.runtime.logprobs import Logprobs


@dataclass(frozen=True)
class PromptSpan:
    """Consecutive tokens of a step, of one sequence that asks for its prompt's log probabilities.

    The prompt's token at `position` + i + 1 is `targets[i]`; it follows the step's token
    `start` + i.
    """

    sequence: Sequence
    start: int
    position: int
    targets: tuple[int, ...]


def prompt_spans(plan: Schedule) -> list[PromptSpan]:
    """What to ask of a step that is about to be launched."""
    spans, start = [], len(plan.decode)
    for sequence in plan.prefill.values():
        count, position = sequence.num_scheduled_tokens, sequence.num_computed_tokens
        if sequence.needs_prompt_logprobs:
            targets = sequence.request.prompt_token_ids[position + 1 : position + 1 + count]
            if targets:
                spans.append(PromptSpan(sequence, start, position, targets))
        start += count
    return spans


class LaunchedRow(NamedTuple):
    """A row of a launched step."""

    sequence: Sequence
    num_tokens: int  # that it has after the step; of a verifying step, if no guess is right
    samples: bool  # whether what the step samples for it counts
    drafts: list[int] | None  # the guesses that the step verifies; None: it verifies none


class Sample(NamedTuple):
    """What a step says about one sampled token; see `StepOutput`."""

    token: int
    finite: bool
    usable: bool
    logprob: TokenLogprob | None


class RowResult(NamedTuple):
    """What a step says about one of its rows: one token, and one more for every right guess.

    Nothing follows a token that came of NaN, or that could not be sampled.
    """

    owner_ok: bool
    samples: list[Sample]


@dataclass(frozen=True)
class InFlight:
    """A launched step: its rows in batch order, and what it is to bring."""

    rows: list[LaunchedRow]
    spans: list[PromptSpan]
    output: "StepOutput"

    @property
    def constrains(self) -> bool:
        """Whether its tokens decide what a row of the next step may sample."""
        return any(row.samples and row.sequence.matcher is not None for row in self.rows)

    def read(self) -> list[RowResult]:
        """Waits for the step. Log probabilities of prompts go to the sequences that asked."""
        output = self.output
        owner_ok = np.asarray(output.owner_ok).tolist()
        columns = [np.asarray(c) for c in (output.tokens, output.finite, output.usable)]
        width = len(columns[0]) // len(owner_ok)  # sampled tokens per row
        lists = [column[: len(self.rows) * width].tolist() for column in columns]
        if self.spans:
            assert output.prompt_logprobs is not None
            self._keep_prompt_logprobs(output.prompt_logprobs)
        samples = list(map(Sample, *lists, self._logprobs(lists[0], width)))
        return [
            RowResult(owner_ok[i], _that_count(samples[i * width : (i + 1) * width], row.drafts))
            for i, row in enumerate(self.rows)
        ]

    def _logprobs(self, tokens: list[int], width: int) -> list[TokenLogprob | None]:
        """Per sampled token, if its row samples and asked."""
        asked = [
            row.sequence.request.params.num_logprobs if row.samples else None for row in self.rows
        ]
        if all(count is None for count in asked):
            return [None] * len(tokens)
        found = _Found.of(self.output.logprobs)
        return [
            None if (count := asked[place // width]) is None else found.entry(place, token, count)
            for place, token in enumerate(tokens)
        ]

    def _keep_prompt_logprobs(self, logprobs: "Logprobs") -> None:
        found = _Found.of(logprobs)
        for span in self.spans:
            known = span.sequence.prompt_logprobs
            count = span.sequence.request.params.prompt_logprobs
            assert known is not None and count is not None
            for i, token in enumerate(span.targets):
                # Otherwise it is known, from before a preemption.
                if span.position + i + 1 == len(known):
                    known.append(found.entry(span.start + i, token, count))


def _that_count(samples: list[Sample], drafts: list[int] | None) -> list[Sample]:
    """The first sampled token of a row, and those after right guesses."""
    counting = samples[:1]
    for guess, following in zip(drafts or (), samples[1:], strict=False):
        newest = counting[-1]
        if newest.token != guess or not (newest.finite and newest.usable):
            break
        counting.append(following)
    return counting


class _Found(NamedTuple):
    """`Logprobs` on the host, as lists."""

    chosen: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]

    @classmethod
    def of(cls, logprobs: "Logprobs") -> "_Found":
        """Waits for them."""
        return cls(*(np.asarray(array).tolist() for array in logprobs))

    def entry(self, place: int, token: int, count: int) -> TokenLogprob:
        """For `token` and the `count` most likely ones in its place."""
        pairs = zip(self.top_ids[place][:count], self.top[place][:count], strict=True)
        top = {other: value for other, value in pairs if other >= 0}
        return TokenLogprob(token, self.chosen[place], top)
