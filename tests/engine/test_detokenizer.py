"""Streamed text is the decoding of all ids, cut at the first stop string, however the ids were grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetier.engine.detokenizer import IncrementalDetokenizer
from pagetier.engine.tokenizer import Tokenizer
from tests.engine.checkpoints import CORPUS
from tests.engine.tokenizers import byte_level, sentencepiece

BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
ALL = (BYTE_LEVEL, SENTENCEPIECE)
ids_lists = st.lists(st.integers(0, 470), max_size=60)
texts = st.text(st.sampled_from("abc ab.\n日é👍")) | st.sampled_from(CORPUS)


def stream(
    tokenizer: Tokenizer, groups: Sequence[Sequence[int]], prompt: Sequence[int] = (), **options: Any
) -> list[str]:
    """The text of each push, then of finish."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


def grouped(ids: Sequence[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    return [list(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("tokenizer", ALL, ids=("byte_level", "sentencepiece"))
@settings(max_examples=200, deadline=None)
@given(ids=ids_lists, skip=st.booleans(), data=st.data())
def test_all_pushes_together_are_the_full_decoding(
    tokenizer: Tokenizer, ids: list[int], skip: bool, data: st.DataObject
) -> None:
    """Any ids: broken UTF-8, special tokens, ids outside the vocabulary."""
    text = "".join(stream(tokenizer, grouped(ids, data), skip_special_tokens=skip))
    assert text == tokenizer.decode(ids, skip)
    if tokenizer is BYTE_LEVEL:
        assert text == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", ALL, ids=("byte_level", "sentencepiece"))
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_no_push_ends_inside_a_code_point(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pushes = stream(tokenizer, [[token] for token in ids])
    assert "".join(pushes) == text == tokenizer.backend.decode(ids)
    assert not any("\ufffd" in push for push in pushes)
    assert pushes[-1] == ""  # nothing is held back without a reason


@settings(max_examples=300, deadline=None)
@given(text=texts, cut=st.integers(0, 50))
def test_output_continues_the_prompt(text: str, cut: int) -> None:
    """Also when the prompt ends in the middle of a code point: the output completes it."""
    for tokenizer in ALL:
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompt, output = ids[:cut], ids[cut:]
        before = tokenizer.decode(prompt)
        assert before.rstrip("\ufffd") + "".join(stream(tokenizer, [output], prompt)) == text or not output


def test_the_first_space_of_a_sentencepiece_answer_stays_when_a_prompt_is_there() -> None:
    prompt, answer = SENTENCEPIECE.encode("the"), SENTENCEPIECE.encode("dog", add_special_tokens=False)
    assert "".join(stream(SENTENCEPIECE, [answer], prompt)) == " dog"
    assert "".join(stream(SENTENCEPIECE, [answer], [1])) == "dog"  # a bos alone is no text
    assert "".join(stream(SENTENCEPIECE, [answer])) == "dog"


# Stop strings


def cut_at_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The rule, the slow way: the first position at which a stop string ends, the longest that ends there."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(st.sampled_from("abc \n日"), max_size=40),
    stops=st.lists(st.text(st.sampled_from("abc \n日"), min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    data=st.data(),
)
def test_text_ends_at_the_first_stop_string(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    for tokenizer in ALL:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer, (), stop=tuple(stops), include_stop=include)
        got, shown = "", []
        for group in grouped(ids, data):
            got += detokenizer.push(group)
            shown.append(got)
        got += detokenizer.finish()
        expected, stopped = cut_at_stop(text, stops, include)
        assert (got, detokenizer.stopped) == (expected, stopped)
        assert all(expected.startswith(prefix) for prefix in shown)  # never took back what was shown
        assert detokenizer.push(ids) == "" and detokenizer.finish() == "" or stopped is None


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    ids = [BYTE_LEVEL.encode(char)[0] for char in "xabaxab"]
    assert stream(BYTE_LEVEL, [[token] for token in ids], stop=("abac",)) == ["x", "", "", "", "abax", "", "", "ab"]


def test_a_stop_string_that_spans_tokens_is_found_and_nothing_follows_it() -> None:
    ids = BYTE_LEVEL.encode("The quick brown fox")
    assert len(ids) >= 4
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), stop=("k bro",))
    text = "".join(detokenizer.push([token]) for token in ids)
    assert text == "The quic" and detokenizer.stopped == "k bro"
    assert detokenizer.push(ids) == "" and detokenizer.finish() == ""


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    ids = [BYTE_LEVEL.encode(char)[0] for char in "ababab"]
    for groups in ([ids], [[token] for token in ids]):
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), stop=("ab",), min_tokens=3)
        text = "".join(detokenizer.push(group) for group in groups) + detokenizer.finish()
        assert text == "abab" and detokenizer.stopped == "ab"


def test_special_tokens_do_not_leak_but_stop_strings_see_them_when_they_show() -> None:
    ids = [*BYTE_LEVEL.encode("a"), 2, *BYTE_LEVEL.encode("b")]
    assert "".join(stream(BYTE_LEVEL, [ids])) == "ab"
    assert "".join(stream(BYTE_LEVEL, [ids], skip_special_tokens=False)) == "a<|im_end|>b"
    assert "".join(stream(BYTE_LEVEL, [ids], skip_special_tokens=False, stop=("<|im",))) == "a"


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Counted, not timed: a stream of lone continuation bytes, which defeats decoders that wait for a clean end."""
    (space,) = BYTE_LEVEL.encode(" ")
    broken = next(token for token in range(448) if BYTE_LEVEL.token_bytes[token] == b"\x80")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), stop=("\ufffd" * 3 + "x",))
    longest = max(len(detokenizer.push([broken])) for _ in range(2000))
    assert longest == 1 and detokenizer.push([space]) == "\ufffd" * 3 + " "
