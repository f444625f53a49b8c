"""Text comes out whole: no half characters, no half stop strings, whatever the tokens are."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid_jax.engine.detokenizer import Detokenizer, StopStrings, TextStream


class ByteLevelTokenizer:
    """A byte-level BPE with few merges, so that emoji and accents split over tokens."""

    def __init__(self) -> None:
        self.rust = Tokenizer(models.BPE())
        self.rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.rust.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.rust.train_from_iterator(["hello world, the stop string"] * 9, trainer)

    def encode(self, text: str) -> list[int]:
        return self.rust.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.rust.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def byte(self, value: int) -> int:
        """The token of a single byte."""
        token = self.rust.token_to_id(next(c for c, b in _BYTES.items() if b == value))
        assert token is not None
        return token


def _byte_alphabet() -> dict[str, int]:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTES = _byte_alphabet()


class MetaspaceTokenizer:
    """A SentencePiece-like decoder: drops the first space, bytes as <0x..> tokens."""

    def __init__(self) -> None:
        vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2}
        vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
        self.rust = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
        self.rust.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.rust.decode(token_ids, skip_special_tokens=skip_special_tokens)


BYTE_LEVEL = ByteLevelTokenizer()
METASPACE = MetaspaceTokenizer()


def pieces(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def detokenizer(prompt: Sequence[int] = (), skip: bool = True) -> Detokenizer:
    return Detokenizer(BYTE_LEVEL, prompt, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["hi 😀!", "naïve — 日本語", "👩‍👩‍👧 family", "🇩🇪"])
def test_no_piece_holds_half_a_character(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text)
    assert len(tokens) > len(text) or len(text) > 12
    out = pieces(detokenizer(), tokens)
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_any_text_survives_token_by_token(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text)
    out = pieces(detokenizer(BYTE_LEVEL.encode("a prompt ")), tokens)
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out)


def test_an_unfinished_character_appears_once_at_the_end() -> None:
    tokens = BYTE_LEVEL.encode("ok 😀")[:-1]
    out = pieces(detokenizer(), tokens)
    assert "".join(out[:-1]) == "ok "
    assert set(out[-1]) == {"\ufffd"}


def test_a_character_begun_in_the_prompt_is_finished_in_the_output() -> None:
    tokens = BYTE_LEVEL.encode("😀 done")
    out = pieces(detokenizer(tokens[:2]), tokens[2:])
    assert "".join(out).endswith(" done")


def test_endless_garbage_is_not_held_for_ever() -> None:
    stream = detokenizer()
    garbage = BYTE_LEVEL.byte(0xF0)
    shown = "".join(stream.push(garbage) for _ in range(200))
    assert len(shown) > 150
    assert len(stream._window) < 40


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = [*BYTE_LEVEL.encode("a"), 0, *BYTE_LEVEL.encode("b")]
    assert "".join(pieces(detokenizer(), tokens)) == "ab"
    assert "".join(pieces(detokenizer(skip=False), tokens)) == "a<eos>b"


def test_the_leading_space_is_kept_after_a_prompt_and_dropped_without() -> None:
    after = Detokenizer(METASPACE, [1], skip_special_tokens=True)
    alone = Detokenizer(METASPACE, [], skip_special_tokens=True)
    assert "".join(pieces(after, [2, 1])) == " world hello"
    assert "".join(pieces(alone, [2, 1])) == "world hello"


def test_byte_fallback_tokens_become_one_character() -> None:
    tokens = [1, *(3 + b for b in "é😀".encode()), 2]
    out = pieces(Detokenizer(METASPACE, [2], skip_special_tokens=True), tokens)
    assert "".join(out) == " helloé😀 world"
    assert not any("\ufffd" in piece for piece in out)


def feed(
    stops: Sequence[str], parts: Sequence[str], include: bool = False
) -> tuple[str, str | None]:
    stream, shown = StopStrings(stops, include=include), ""
    for part in parts:
        text, stop = stream.push(part)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + stream.flush(), None


def test_a_stop_string_over_several_pieces_is_never_shown() -> None:
    assert feed(["STOP"], ["ab S", "TO", "P cd"]) == ("ab ", "STOP")
    assert feed(["STOP"], ["ab S", "TO", "P cd"], include=True) == ("ab STOP", "STOP")


def test_text_that_only_began_a_stop_string_is_shown_after_all() -> None:
    stream = StopStrings(["STOP"], include=False)
    assert stream.push("x ST") == ("x ", None)
    assert stream.push("ART") == ("START", None)
    assert stream.push("ST") == ("", None)
    assert stream.flush() == "ST"


@pytest.mark.parametrize("may_stop", [True, False])
def test_half_a_character_at_the_end_may_complete_a_stop_string(may_stop: bool) -> None:
    tokens, stop = BYTE_LEVEL.encode("aé")[:-1], "\ufffd"
    stream = TextStream(detokenizer(), StopStrings([stop], include=False))
    assert [stream.push(token, may_stop=may_stop) for token in tokens] == [("a", None), ("", None)]
    assert stream.flush(may_stop=may_stop) == (("", stop) if may_stop else (stop, None))


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert feed(["xyzab", "za"], ["wxyzab"]) == ("wxy", "za")
    assert feed(["a", "ba"], ["cba"]) == ("c", "ba")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=12),
    st.booleans(),
)
def test_how_text_is_cut_changes_nothing(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    parts, rest = [], text
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    expected = feed(stops, list(text), include)
    assert feed(stops, [*parts, rest], include) == expected
    assert feed(stops, [text], include) == expected
    if expected[1] is None:
        assert expected[0] == text and not any(stop in text for stop in stops)


def test_a_stop_string_split_over_tokens_ends_the_text() -> None:
    tokens = BYTE_LEVEL.encode("hello 😀 the stop string and more")
    stream = TextStream(detokenizer(), StopStrings(["😀 the stop"], include=False))
    shown, found, used = "", None, 0
    for token in tokens:
        text, found = stream.push(token)
        shown += text
        used += 1
        if found is not None:
            break
    assert (shown, found) == ("hello ", "😀 the stop")
    assert used < len(tokens)


def test_stop_strings_are_plain_text_before_the_minimum() -> None:
    stream = TextStream(detokenizer(), StopStrings(["ab"], include=False))
    a, b = BYTE_LEVEL.encode("a")[0], BYTE_LEVEL.encode("b")[0]
    assert stream.push(a, may_stop=False) == ("", None)  # it may be complete after the minimum
    assert stream.push(b, may_stop=False) == ("ab", None)
    assert stream.push(a) == ("", None)
    assert stream.push(b) == ("", "ab")


def test_a_stop_string_that_begins_before_the_minimum_is_found() -> None:
    stream = TextStream(detokenizer(), StopStrings(["ab"], include=False))
    a, b = BYTE_LEVEL.encode("a")[0], BYTE_LEVEL.encode("b")[0]
    assert stream.push(b, may_stop=False) == ("b", None)
    assert stream.push(a, may_stop=False) == ("", None)
    assert stream.push(b) == ("", "ab")
