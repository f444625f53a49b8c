"""Where prefill chunks end. Positions are absolute, so that a prefix hit changes no chunk after it.

Linear-attention kernels cut a chunk into blocks from its first token on. If every chunk begins at a
multiple of that block, the blocks are the same whatever the chunks are: cache hit or miss, long
chunks or short, the arithmetic is the same.
"""

from dataclasses import dataclass

from hybrid_jax.engine.types import Sequence


@dataclass(frozen=True)
class PrefillGrid:
    """The rules for chunk ends of one engine."""

    alignment: int  # chunks that nothing else ends, end at a multiple
    granularity: int  # states are cached at multiples only
    interval: int  # tokens between the states kept of a prompt; 0: none are kept

    def stops(self, sequence: Sequence, shared: int) -> tuple[int, ...]:
        """Where chunks of a sequence that is about to be admitted must end, besides the grid.

        The point where it diverges from cached prompts (`shared` tokens are equal), the last point
        at which an exact repeat can hit, and the token before the last of a prompt that several
        completions fork from.
        """
        stops = set[int]()
        length = len(sequence.token_ids)
        if self.interval:
            stops = {self.align(shared), self.align(length - 1)}
        if sequence.request.params.num_sequences > 1 and not sequence.num_output_tokens:
            stops.add(length - 1)
        return tuple(sorted(stops))

    def align(self, num_tokens: int) -> int:
        """The last position up to `num_tokens` where a state may be cached."""
        return num_tokens - num_tokens % self.granularity

    def clip(self, sequence: Sequence, most: int, *, may_wait: bool) -> int:
        """Tokens of the next prefill chunk, at most `most`.

        0 if the grid leaves none, which `may_wait` allows: with more room in the next step there
        will be some.
        """
        start, last = sequence.num_computed_tokens, sequence.num_prefill_tokens
        stop = min((s for s in sequence.stops if s > start), default=last)
        if self.interval:
            stop = min(stop, start - start % self.interval + self.interval)
        end = min(start + most, stop, last)
        if end in (stop, last):
            return end - start
        aligned = end - end % self.alignment
        if aligned > start:
            return aligned - start
        return 0 if may_wait else end - start

    def checkpoint(self, sequence: Sequence, start: int) -> int:
        """After how many tokens, of those computed from `start` on, the state is to be cached.

        0 if nowhere. Of a prefill chunk there is no state but the last.
        """
        end = sequence.num_computed_tokens
        length = self.align(end)
        if not self.interval or length <= start:
            return 0
        if start >= sequence.num_prefill_tokens:
            return length
        due = sequence.is_decoding or not length % self.interval or length in sequence.stops
        return length if length == end and due else 0
