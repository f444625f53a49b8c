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


class RowResult(NamedTuple):
    """What a step says about one of its rows; see `StepOutput`."""

    token: int
    finite: bool
    usable: bool
    owner_ok: bool
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class InFlight:
    """A launched step: per row in batch order its sequence, the tokens it has after the step, and
    whether it samples one."""

    rows: list[tuple[Sequence, int, bool]]
    spans: list[PromptSpan]
    output: "StepOutput"

    @property
    def constrains(self) -> bool:
        """Whether its tokens decide what a row of the next step may sample."""
        return any(samples and sequence.matcher is not None for sequence, _, samples in self.rows)

    def read(self) -> list[RowResult]:
        """Waits for the step. Log probabilities of prompts go to the sequences that asked."""
        output = self.output
        columns = (output.tokens, output.finite, output.usable, output.owner_ok)
        lists = [np.asarray(column)[: len(self.rows)].tolist() for column in columns]
        if self.spans:
            assert output.prompt_logprobs is not None
            self._keep_prompt_logprobs(output.prompt_logprobs)
        return list(map(RowResult, *lists, self._logprobs()))

    def _logprobs(self) -> list[TokenLogprob | None]:
        """Per row, if it samples and asked."""
        asked = [s.request.params.num_logprobs if samples else None for s, _, samples in self.rows]
        if all(count is None for count in asked):
            return [None] * len(asked)
        tokens = np.asarray(self.output.tokens).tolist()
        found = _Found.of(self.output.logprobs)
        return [
            None if count is None else found.entry(row, tokens[row], count)
            for row, count in enumerate(asked)
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
