"""Stop strings against an oracle that reads the whole text, a character at a time."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from radixrt.tokenizer.answer.detokenizer import StopStringFinder

letters = st.text("ab", min_size=0, max_size=30)
stop_sets = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def oracle(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Cut before the longest stop string that ends at the first character where one ends."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed(finder: StopStringFinder, pieces: list[str]) -> tuple[str, str | None]:
    out = ""
    for piece in pieces:
        certain, stop = finder.push(piece)
        out += certain
        if stop is not None:
            return out, stop
    return out + finder.flush(), None


@given(letters, stop_sets, st.lists(st.integers(0, 30)))
def test_however_the_text_is_cut_the_answer_ends_where_the_oracle_says(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert feed(StopStringFinder(stops), pieces) == oracle(text, stops)


@given(letters, stop_sets)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    certain, stop = StopStringFinder(stops).push(text)
    if stop is None:
        held = text[len(certain) :]
        assert all(not text.endswith(s[:k]) for s in stops for k in range(len(held) + 1, len(s)))
        assert not held or any(s.startswith(held) for s in stops)


@given(letters, stop_sets)
def test_the_stop_string_is_kept_where_it_was_asked_for(text: str, stops: tuple[str, ...]) -> None:
    expected, stop = oracle(text, stops)
    kept = feed(StopStringFinder(stops, include_in_output=True), list(text))
    assert kept == (expected + (stop or ""), stop)
