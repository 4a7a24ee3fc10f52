"""The marks around an answer are no content, and a model that is not asked to reason does not."""

import pytest

from radixrt.base.config import ServerConfig
from radixrt.constrained.constraint import AnyJson
from radixrt.messages.requests import GenerateRequest, TextPrompt
from radixrt.tokenizer.answer.output_parser import OutputParser, grammar_place
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level

ASKED = "Write your thoughts between <think></think>. Why?"
GRANITE = "Here is my thought process:\nHm.\n\nHere is my response:\nYes"
ANSWERS = [
    ("seed_oss", "Why?", "<seed:think>Hm.</seed:think>Yes", ("Hm.", "Yes")),
    ("hunyuan", "Why?", "<think>\nHm.\n</think>\n<answer>\nYes\n</answer>", ("Hm.", "Yes")),
    ("hunyuan", "Why?<think>\n\n</think>\n", "<answer>\nYes\n</answer>", ("", "Yes")),
    ("ernie45", "Why?", "Hm.\n</think>\n\n\n<response>\nYes\n</response>\n", ("Hm.", "Yes\n")),
    ("ernie45", "Why?", "Hm.\n</think>\nYes", ("Hm.", "Yes")),
    ("granite", ASKED, GRANITE, ("Hm.", "Yes")),
    ("granite", "Why?", "Here is my thought", ("", "Here is my thought")),
    ("granite33", ASKED, "<think>Hm.</think>\n\n<response>Yes</response>", ("Hm.", "Yes")),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = save_byte_level(tmp_path_factory.mktemp("tokenizer"))
    return Vocabulary.load(ServerConfig(model_path=str(folder)))


@pytest.mark.parametrize(("name", "prompt", "answer", "expected"), ANSWERS)
def test_the_marks_around_an_answer_are_no_content(
    vocabulary: Vocabulary, name: str, prompt: str, answer: str, expected: tuple[str, str]
) -> None:
    request = GenerateRequest(request_id="a", prompt=TextPrompt(prompt), parse_reasoning=name)
    for pieces in ([*answer], [answer]):
        parser = OutputParser.for_request(request, vocabulary, vocabulary.encode(prompt, False))
        found = [""] * 2
        for number, piece in enumerate(pieces, 1):
            reasoning, content, calls = parser.split(piece, is_last=number == len(pieces))
            found = [found[0] + reasoning, found[1] + content]
            assert not calls
        assert tuple(found) == expected


@pytest.mark.parametrize(("prompt", "waits"), [(ASKED, True), ("Why?", False)])
def test_a_grammar_waits_for_reasoning_that_the_prompt_asks_for(
    vocabulary: Vocabulary, prompt: str, waits: bool
) -> None:
    request = GenerateRequest(
        request_id="a", prompt=TextPrompt(prompt), parse_reasoning="granite", constraint=AnyJson()
    )
    place = grammar_place(request, vocabulary, vocabulary.encode(prompt, False))
    assert place.begin_after == (vocabulary.encode("Here is my response:", False) if waits else [])


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<", "thi", "nk>", "Hm.", "</", "think", ">", '"a"'], ("Hm.", '"a"')),
        (["<", "think", ">\n", "a</thi</think>", "{}"], ("a</thi", "{}")),
        (["<", "thin", '"'], ("", '<thin"')),
        (["<", "thi"], ("", "<thi")),
    ],
)
def test_held_content_begins_behind_a_tag_in_any_tokens(
    vocabulary: Vocabulary, pieces: list[str], expected: tuple[str, str]
) -> None:
    """The last answer is complete: the grammar allows it, so it opened nothing."""
    request = GenerateRequest(
        request_id="a", prompt=TextPrompt(""), parse_reasoning="qwen3", constraint=AnyJson()
    )
    parser = OutputParser.for_request(request, vocabulary, [])
    parts = []
    for piece in pieces:
        tokens = vocabulary.encode(piece, False)
        assert vocabulary.decode(tokens) == piece
        for token in tokens:
            text = vocabulary.decode([token])
            parser.watch(text, token)
            parts.append(parser.split(text, is_last=False))
    parser.complete()
    parts.append(parser.split("", is_last=True))
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == expected


def test_an_answer_that_is_cut_off_in_its_opening_is_reasoning(vocabulary: Vocabulary) -> None:
    request = GenerateRequest(
        request_id="a", prompt=TextPrompt(""), parse_reasoning="qwen3", constraint=AnyJson()
    )
    parser = OutputParser.for_request(request, vocabulary, [])
    for token in vocabulary.encode("<thi", False):
        parser.watch(vocabulary.decode([token]), token)
    assert parser.split("<thi", is_last=True) == ("<thi", "", [])
