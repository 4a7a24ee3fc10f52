"""The thought before an answer, however its text is cut into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.parsers.reasoning import FORMATS, ReasoningFormat, ReasoningParser

QWEN, DEEPSEEK, GEMMA4 = FORMATS["qwen3"], FORMATS["deepseek-r1"], FORMATS["gemma4"]
ANSWER = "<think>\nTwo < three.\n\nSo </thin no.\n</think>\n\nYes. </think> too"
CUTS = st.lists(st.integers(0, 200))


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def parse(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(thought for thought, _ in parts), "".join(content for _, content in parts)


def parse_held(
    parser: ReasoningParser, thought: str, content: str, cuts: list[int]
) -> tuple[str, str]:
    """The same, of a parser that is told when the grammar of the content begins."""
    parts, seen = [], 0
    for piece in pieces_of(thought + content, cuts):
        seen += len(piece)
        if seen >= len(thought):
            parser.reasoning_length = len(thought)
        parts.append(parser.push(piece))
    parts.append(parser.flush())
    return "".join(t for t, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS)
@given(cuts=CUTS)
def test_the_thought_is_split_off_however_it_comes(
    written: ReasoningFormat, cuts: list[int]
) -> None:
    answer = ANSWER.replace("<think>", written.opening).replace("</think>", written.closing)
    parsed = parse(ReasoningParser(written), pieces_of(answer, cuts))
    assert parsed == ("Two < three.\n\nSo </thin no.", f"Yes. {written.closing} too")


@given(cuts=CUTS)
def test_an_answer_without_a_thought_stays_as_it_is(cuts: list[int]) -> None:
    text = "\n <thin ice> is </think> all "
    assert parse(ReasoningParser(QWEN), pieces_of(text, cuts)) == ("", text)


@given(cuts=CUTS)
def test_a_thought_that_is_never_closed_is_no_content(cuts: list[int]) -> None:
    text = "<think>I wonder </thi"
    for written in (QWEN, DEEPSEEK):
        assert parse(ReasoningParser(written), pieces_of(text, cuts)) == ("I wonder </thi", "")


def test_a_prompt_may_have_opened_the_thought_or_closed_it() -> None:
    text = "Hm.</think>Yes"
    for written in (QWEN, DEEPSEEK):
        opened = ReasoningParser(written, "<|im_start|>assistant\n<think>\n")
        assert parse(opened, [text]) == ("Hm.", "Yes")
        closed = ReasoningParser(written, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert parse(closed, [text]) == ("", text)


def test_deepseek_s_answer_begins_inside_a_thought() -> None:
    assert parse(ReasoningParser(DEEPSEEK), ["Hm.</think>\n\nYes"]) == ("Hm.", "Yes")
    assert parse(ReasoningParser(QWEN), ["Hm.</think>\n\nYes"]) == ("", "Hm.</think>\n\nYes")


@given(cuts=CUTS)
def test_the_label_of_a_channel_is_no_thought(cuts: list[int]) -> None:
    for text, parsed in {
        "<|channel>thought\nI'm\nthinking<channel|>Hello": ("I'm\nthinking", "Hello"),
        "<|channel>thought<channel|>Hello": ("", "Hello"),
        "<|channel>thoughts<channel|>": ("s", ""),
        "<|channel>thou<channel|>Hello": ("thou", "Hello"),
        "thought\n<|channel>": ("", "thought\n<|channel>"),
    }.items():
        assert parse(ReasoningParser(GEMMA4), pieces_of(text, cuts)) == parsed
    begun = ReasoningParser(GEMMA4, "<|turn>model\n<|channel>thought\n")
    assert parse(begun, pieces_of("thoughts<channel|>Yes", cuts)) == ("thoughts", "Yes")
    closed = ReasoningParser(GEMMA4, "<|turn>model\n<|channel>thought\n<channel|>")
    assert closed.has_none and parse(closed, pieces_of("thought", cuts)) == ("", "thought")


@given(cuts=CUTS, labelled=st.booleans())
def test_a_grammar_begins_behind_a_labelled_thought(cuts: list[int], labelled: bool) -> None:
    thought, content = f"<|channel>{'thought' * labelled}\nHm.<channel|>", "{}"
    parser = ReasoningParser(GEMMA4, held=True)
    parser.opened = True
    assert parse_held(parser, thought, content, cuts) == ("Hm.", content)


@given(cuts=CUTS)
def test_held_content_begins_where_its_grammar_does(cuts: list[int]) -> None:
    """The thought writes its closing tag in other tokens first: the grammar has not begun."""
    thought, content = "<think>a </think> b </think>", "\n\n{}"
    parser = ReasoningParser(QWEN, held=True)
    parser.opened = True
    assert parse_held(parser, thought, content, cuts) == ("a </think> b", content)


@given(cuts=CUTS, opened=st.booleans())
def test_held_content_begins_at_once_unless_the_first_token_opens_a_thought(
    cuts: list[int], opened: bool
) -> None:
    """The content may begin as the tag does, in other tokens."""
    thought, content = "<think>a</think>", "<think> is a tag"
    parser = ReasoningParser(QWEN, held=True)
    assert parser.is_optional and parser.needs_opening
    parts, seen = [], 0
    for piece in pieces_of(thought + content if opened else content, cuts):
        parser.opened, seen = opened, seen + len(piece)
        if opened and seen >= len(thought):
            parser.reasoning_length = len(thought)
        parts.append(parser.push(piece))
    parts.append(parser.flush())
    assert "".join(t for t, _ in parts) == ("a" if opened else "")
    assert "".join(c for _, c in parts) == content
    assert parser.end == (len(thought) if opened else 0)


def test_a_thought_is_not_optional_where_the_prompt_or_the_model_begins_it() -> None:
    for written, prompt in ((DEEPSEEK, ""), (QWEN, "<think>\n"), (QWEN, "<think>\n\n</think>\n\n")):
        assert not ReasoningParser(written, prompt, held=True).is_optional


def test_held_content_that_never_began_is_a_thought() -> None:
    for text in ("<think>a</think>", "no tag at all", "  <th"):
        thought, content = parse(ReasoningParser(QWEN, held=True), [text])
        assert content == "" and thought
