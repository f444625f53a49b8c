"""Tokens to text, one token at a time: whole characters only, and stop strings across tokens."""

from collections.abc import Sequence

from hybrid_jax.engine.types import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 5  # prompt tokens decoded along, so that the first output keeps its leading space
# A character is at most four bytes, hence four tokens: what is incomplete for longer is garbage.
_MAX_PENDING = 16


class Detokenizer:
    """Emits the text of a growing list of tokens, never half a character.

    Decoders are not additive: the text of a token depends on its neighbours (leading spaces, bytes
    of one character). So a window of tokens is decoded twice, with and without the new ones:

        tokens  ... | prefix ... read | ... end
                    |<-- context ---->|<- pending ->|

    and the difference is the new text, once it does not end in an incomplete character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt[-_CONTEXT:])
        self._read = len(self._window)
        self._context_text = self._decode(self._window)
        if self._context_text.endswith(_REPLACEMENT):
            # The prompt ends within a character; its rest belongs to the output.
            self._window, self._read, self._context_text = [], 0, ""

    def push(self, token_id: int) -> str:
        """The text that became certain with `token_id`; often empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._read
        if text.endswith(_REPLACEMENT) and pending < _MAX_PENDING:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The text still held back, incomplete characters as U+FFFD."""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new:
            del self._window[: self._read]
            self._read = len(self._window)
            self._context_text = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopStrings:
    """Finds the first stop string in a stream of text, however the text is cut into pieces.

    Text that could still become a stop string is held back. Of several stop strings the one that
    is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """With `include` the stop string found stays in the text."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string if one is complete."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at + len(s), s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            end, stop = min(found, key=lambda pair: pair[0])  # stable: the longest comes first
            shown = self._held[: end if self._include else end - len(stop)]
            self._held = ""
            return shown, stop
        keep = self._longest_start()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def skip(self, text: str) -> str:
        """The text that can be shown now, while stop strings that are complete do not count yet."""
        self._held += text
        shown = ""
        while found := [at + len(s) for s in self._stops if (at := self._held.find(s)) >= 0]:
            end = min(found)
            shown, self._held = shown + self._held[:end], self._held[end:]
        cut = len(self._held) - (self._longest_start() if self._stops else 0)
        shown, self._held = shown + self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The text still held back, now that no more follows."""
        shown, self._held = self._held, ""
        return shown

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = len(self._stops[0]) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0


class TextStream:
    """The text of one completion: detokenizer, then stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that can be shown after `token_id`, and the stop string if one is complete.

        Stop strings that are complete while `may_stop` is false are plain text.
        """
        text = self._detokenizer.push(token_id)
        if not may_stop:
            return self._stops.skip(text), None
        return self._stops.push(text) if text else ("", None)

    def flush(self, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The rest of the text, and the stop string if an incomplete character completes one.

        Call it once, when the completion has ended without a match.
        """
        text, stop = self._detokenizer.flush(), None
        if may_stop:
            text, stop = self._stops.push(text)
        else:
            text = self._stops.skip(text)
        return (text, stop) if stop is not None else (text + self._stops.flush(), None)
