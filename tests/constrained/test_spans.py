"""Checked values are found where a slow reader of the whole text finds them, however the text is
cut."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.constrained.grammar import SpanCheck
from radixrt.tokenizer.retry.spans import CompletedSpan, SpanTracker

NAMES = ["a", "b", "", 'q"\\', "é", "/", "😀"]
WHITE_SPACE = st.sampled_from(["", "", "", " ", "\n\t", "\r  "])


def escaped(text: str, ways: st.DataObject) -> str:
    """A JSON string of ``text``, each character in one of the ways that JSON allows."""
    out = []
    for character in text:
        plain = json.dumps(character, ensure_ascii=False)[1:-1]
        utf16 = character.encode("utf-16-be")
        code = "".join(f"\\u{utf16[i : i + 2].hex()}" for i in range(0, len(utf16), 2))
        out.append(ways.draw(st.sampled_from([plain, plain, code, code.upper().replace("U", "u")])))
    return f'"{"".join(out)}"'


def write(value: Any, ways: st.DataObject) -> str:
    """``value`` as JSON with random white space and escapes."""

    def space() -> str:
        return ways.draw(WHITE_SPACE)

    if isinstance(value, str):
        text = escaped(value, ways)
    elif isinstance(value, list):
        text = f"[{','.join(write(item, ways) for item in value) or space()}]"
    elif isinstance(value, dict):
        members = [
            f"{space()}{escaped(name, ways)}{space()}:{write(item, ways)}"
            for name, item in value.items()
        ]
        text = f"{{{','.join(members) or space()}}}"
    else:
        text = json.dumps(value)
    return space() + text + space()


def spans_of(text: str) -> Iterator[tuple[tuple[str | int, ...], int, int]]:
    """Path, start and end of every value, by the standard library's decoder; inner before outer."""
    decoder = json.JSONDecoder()

    def skip(at: int, characters: str = " \t\r\n") -> int:
        while text[at] in characters:
            at += 1
        return at

    def walk(
        path: tuple[str | int, ...], start: int
    ) -> Iterator[tuple[tuple[str | int, ...], int, int]]:
        _, end = decoder.raw_decode(text, start)
        at = skip(start + 1) if text[start] in "[{" else end
        for index in itertools.count():
            if at >= end or text[at] in "]}":
                break
            step: str | int = index
            if text[start] == "{":
                step, at = decoder.raw_decode(text, at)
                at = skip(at, " \t\r\n:")
            yield from walk((*path, step), at)
            at = skip(decoder.raw_decode(text, at)[1], " \t\r\n,")
        yield path, start, end

    yield from walk((), skip(0))


def expected(text: str, paths: list[tuple[str | None, ...]]) -> list[tuple[Any, int, int]]:
    """What the definition of a path says, value by value."""

    def is_at(path: tuple[str | None, ...], steps: tuple[str | int, ...]) -> bool:
        if len(path) != len(steps):
            return False
        for depth, (mine, step) in enumerate(zip(path, steps, strict=True)):
            named = {
                other[depth]
                for other in paths
                if len(other) > depth and other[:depth] == path[:depth]
            }
            if mine is None:
                if step in named:
                    return False
            elif mine != step:
                return False
        return True

    return [
        (path, start, end)
        for steps, start, end in spans_of(text)
        for path in paths
        if is_at(path, steps)
    ]


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def tracker_of(*paths: tuple[str | None, ...]) -> SpanTracker:
    return SpanTracker(
        tuple(SpanCheck(path=path, schema=True, pointer="", keywords=()) for path in paths)
    )


def found(spans: list[CompletedSpan]) -> list[tuple[Any, int, int]]:
    return [(span.check.path, span.start, span.end) for span in spans]


names = st.sampled_from(NAMES)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    names,
    st.text(max_size=5).filter(lambda text: text.isprintable()),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
paths = st.lists(
    st.lists(st.none() | names, max_size=3).map(tuple), min_size=1, max_size=5, unique=True
)
cuts = st.lists(st.integers(0, 80)) | st.just(list(range(1000)))


@settings(deadline=None)
@given(values, paths, cuts, st.data())
def test_spans_are_where_the_standard_library_finds_them(
    value: Any, paths: list[tuple[str | None, ...]], cuts: list[int], ways: st.DataObject
) -> None:
    text = write(value, ways)
    tracker = tracker_of(*paths)
    spans: list[CompletedSpan] = []
    for piece in pieces_of(text, cuts):
        spans += tracker.push(piece)
    spans += tracker.finish()
    assert sorted(found(spans), key=repr) == sorted(expected(text, paths), key=repr)
    assert [span.end for span in spans] == sorted(span.end for span in spans)
    assert tracker.offset == len(text) and tracker.open_since is None


@settings(deadline=None)
@given(values, paths, st.integers(0, 200), st.data())
def test_what_is_open_is_what_has_begun_and_not_ended(
    value: Any, paths: list[tuple[str | None, ...]], cut: int, ways: st.DataObject
) -> None:
    text = write(value, ways)
    cut = min(cut, len(text))
    tracker = tracker_of(*paths)
    done = set(found(tracker.push(text[:cut])))
    begun = {span for span in expected(text, paths) if span[1] < cut}
    assert tracker.open_since == min((start for _, start, _ in begun - done), default=None)
    # Only a number may have ended without our knowing it.
    assert all(
        end > cut or (end == cut and text[start] in "-0123456789tfn")
        for _, start, end in begun - done
    )


@settings(deadline=None)
@given(values, paths, cuts, st.lists(st.integers(0, 80), max_size=5), st.data())
def test_a_tracker_that_went_back_is_as_good_as_new(
    value: Any,
    paths: list[tuple[str | None, ...]],
    cuts: list[int],
    returns: list[int],
    ways: st.DataObject,
) -> None:
    text = write(value, ways)
    pieces = pieces_of(text, cuts)
    tracker, checkpoints, spans = tracker_of(*paths), [], []
    at = 0
    while at < len(pieces) or returns:
        if returns and at >= returns[-1] % (len(pieces) + 1):
            to = returns.pop() // 2 % (at + 1)
            if to < at:
                tracker.reset(checkpoints[to])
                del checkpoints[to:], spans[to:]
                at = to
        elif at < len(pieces):
            checkpoints.append(tracker.checkpoint())
            spans.append(tracker.push(pieces[at]))
            at += 1
    spans.append(tracker.finish())
    assert sorted(found(list(itertools.chain(*spans))), key=repr) == sorted(
        expected(text, paths), key=repr
    )


@settings(deadline=None)
@given(st.text('{}[]",:\\u0 1-.eEtrualsn\n@é', max_size=12))
def test_a_text_that_is_no_json_comes_to_an_end_too(text: str) -> None:
    tracker = tracker_of((), ("a", None))
    with contextlib.suppress(ValueError):
        tracker.push(text)
        assert tracker.offset == len(text)
        tracker.finish()


@pytest.mark.parametrize("text", ["]", ",", '"a",', "1 2", "{}}", '[] "'])
def test_what_follows_the_whole_value_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        tracker_of(()).push(text)


def test_a_named_property_is_not_any_other() -> None:
    tracker = tracker_of(("a",), (None,), ("b", "c"))
    spans = tracker.push('{"a": 1, "\\u0061": 2, "b": 3, "x": 4}')
    assert found(spans) == [(("a",), 6, 7), (("a",), 19, 20), ((None,), 35, 36)]


def test_elements_are_any_and_names_mean_nothing_in_arrays() -> None:
    tracker = tracker_of((None,), ("0",))
    assert found(tracker.push("[1,[2]]")) == [((None,), 1, 2), ((None,), 3, 6)]


def test_depth_costs_no_recursion() -> None:
    tracker = tracker_of((), (None, None))
    assert len(tracker.push("[" * 100_000 + "]" * 100_000)) == 2
