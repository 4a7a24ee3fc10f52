"""What of an answer with checks is told, when, and how it goes on after a wrong value."""

import json
from collections.abc import Callable

import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.grammar import SpanCheck, SpanError
from radixrt.messages.answers import AnswerReport, FinishReason
from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceOutput, SequenceRequest
from radixrt.tokenizer.constraints.manager import token_texts
from radixrt.tokenizer.retry.checked_answer import DueCheck, RetriesExhausted
from radixrt.tokenizer.retry.checked_sequence import FINAL_CHECK, CheckedSequence
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.constrained.checked_decoding import validate_span

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
CHECK = SpanCheck(path=("a",), schema=UNIQUE, pointer="/properties/a", keywords=("uniqueItems",))
PROMPT = [5, 6, 7]
END_TOKEN = 1


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_level(folder)
    return Vocabulary.load(ServerConfig(model_path=str(folder)))


@pytest.fixture
def make(vocabulary: Vocabulary) -> Callable[..., CheckedSequence]:
    texts = token_texts(vocabulary)

    def make(
        checks: tuple[SpanCheck, ...] = (CHECK,),
        begin_after: tuple[int, ...] = (),
        then_after: tuple[int, ...] = (),
        opening: tuple[int, ...] = (),
        **settings: object,
    ) -> CheckedSequence:
        request = SequenceRequest(
            seq_id=1,
            token_ids=pack_ids(PROMPT),
            grammar=GrammarUse(
                b"key",
                begin_after=pack_ids(begin_after),
                then_after=pack_ids(then_after),
                opening=pack_ids(opening),
            ),
            options=RequestOptions(sampling=SamplingParams(max_tokens=100, seed=3)),
        )
        options: dict = {"max_failures": 4, **settings}
        return CheckedSequence(request, checks, vocabulary, texts, **options)

    return make


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """A token a character, so that every boundary is one."""
    return [t for c in text for t in vocabulary.encode(c, add_special_tokens=False)]


def told_text(vocabulary: Vocabulary, news: SequenceOutput | None) -> str:
    return "" if news is None else vocabulary.decode(news.token_ids, skip_special_tokens=True)


def ended(reason: FinishReason = "stop") -> AnswerReport:
    return AnswerReport(finish_reason=reason)


def errors_of(due: DueCheck) -> list[SpanError]:
    return validate_span(due.check.schema, due.text)


def test_what_is_before_a_checked_value_is_told_and_the_value_waits(
    make: Callable[..., CheckedSequence], vocabulary: Vocabulary
) -> None:
    checked = make()
    checked.absorb(SequenceOutput(tokens_of(vocabulary, '{"b": 1, "a": [1, 2')))
    assert told_text(vocabulary, checked.take_output()) == '{"b": 1, "a": '
    assert checked.due() == [] and checked.take_output() is None
    checked.absorb(SequenceOutput(tokens_of(vocabulary, "]")))
    (due,) = checked.due()
    assert json.loads(due.text) == [1, 2] and checked.take_output() is None
    assert checked.validated(due, errors_of(due), seq_id=2) is None
    assert told_text(vocabulary, checked.take_output()) == "[1, 2]"


def test_a_wrong_value_goes_on_as_a_new_sequence(
    make: Callable[..., CheckedSequence], vocabulary: Vocabulary
) -> None:
    checked = make()
    before, wrong = tokens_of(vocabulary, '{"a": '), tokens_of(vocabulary, "[4, 4]")
    checked.absorb(
        SequenceOutput([*before, *wrong, *tokens_of(vocabulary, "}"), END_TOKEN], finished=ended())
    )
    told = told_text(vocabulary, checked.take_output())
    (due,) = checked.due()
    again = checked.validated(due, errors_of(due), seq_id=2)
    assert again is not None and again.seq_id == checked.seq_id == 2
    kept = unpack_ids(again.token_ids).tolist()
    assert kept[:3] == PROMPT and kept[3:] == [*before, *wrong][: again.num_output]
    assert len(before) <= again.num_output < len(before) + len(wrong)
    assert again.sampling.max_tokens == 100 and again.sampling.seed != 3
    assert again.grammar is not None and again.grammar.excluded
    rest = [*before, *tokens_of(vocabulary, "[4, 5]}")][again.num_output :]
    checked.absorb(SequenceOutput([*rest, END_TOKEN], finished=ended()))
    (due,) = checked.due()
    assert checked.validated(due, errors_of(due), seq_id=3) is None
    news = checked.take_output()
    assert news is not None and news.finished is not None
    assert told + told_text(vocabulary, news) == '{"a": [4, 5]}'
    assert checked.retries == 1


def test_retries_are_bounded(make: Callable[..., CheckedSequence], vocabulary: Vocabulary) -> None:
    checked = make()
    checked.absorb(SequenceOutput(tokens_of(vocabulary, '{"a": [4, 4]')))
    with pytest.raises(RetriesExhausted, match="uniqueItems at /properties/a"):
        for number in range(100):
            (due,) = checked.due()
            again = checked.validated(due, errors_of(due), seq_id=number)
            assert again is not None
            whole = tokens_of(vocabulary, '{"a": [4, 4]')
            checked.absorb(SequenceOutput(whole[again.num_output :]))


def test_the_thought_is_told_at_once_and_stays(
    make: Callable[..., CheckedSequence], vocabulary: Vocabulary
) -> None:
    close = tokens_of(vocabulary, "</t>")
    then = tokens_of(vocabulary, ":")
    checked = make(begin_after=tuple(close), then_after=tuple(then))
    thought = [
        *tokens_of(vocabulary, 'so "a": [1,1] '),
        *close,
        *tokens_of(vocabulary, "now"),
        *then,
    ]
    checked.absorb(SequenceOutput(thought))
    news = checked.take_output()
    assert news is not None and news.token_ids == thought
    checked.absorb(SequenceOutput(tokens_of(vocabulary, '{"a": [1, 1]')))
    (due,) = checked.due()
    again = checked.validated(due, errors_of(due), seq_id=2)
    assert again is not None and again.num_output > len(thought)
    assert unpack_ids(again.token_ids).tolist()[3 : 3 + len(thought)] == thought


def test_first_tokens_that_open_no_reasoning_are_checked(
    make: Callable[..., CheckedSequence], vocabulary: Vocabulary
) -> None:
    """They wait until that is known. The answer that goes on behind a wrong value can't open
    any."""
    opening, close = tokens_of(vocabulary, '{"think}'), tokens_of(vocabulary, "</t>")
    checked = make(begin_after=tuple(close), opening=tuple(opening))
    checked.absorb(SequenceOutput(tokens_of(vocabulary, '{"')))
    assert checked.take_output() is None
    checked.absorb(SequenceOutput(tokens_of(vocabulary, 'a": [4, 4]')))
    assert told_text(vocabulary, checked.take_output()) == '{"a": '
    (due,) = checked.due()
    again = checked.validated(due, errors_of(due), seq_id=2)
    assert again is not None and again.grammar is not None
    assert not again.grammar.opening and not again.grammar.begin_after
    opened = make(begin_after=tuple(close), opening=tuple(opening))
    thought = [*opening, *tokens_of(vocabulary, '"a": [4, 4]'), *close]
    opened.absorb(SequenceOutput(thought))
    news = opened.take_output()
    assert news is not None and news.token_ids == thought and not opened.due()
    cut = make(begin_after=tuple(close), opening=tuple(opening))
    cut.absorb(SequenceOutput(opening[:3], finished=ended("length")))
    news = cut.take_output()
    assert news is not None and news.token_ids == opening[:3] and news.finished is not None


def test_a_value_that_is_cut_off_is_told(
    make: Callable[..., CheckedSequence], vocabulary: Vocabulary
) -> None:
    checked = make()
    checked.absorb(SequenceOutput(tokens_of(vocabulary, '{"a": [4, 4'), finished=ended("length")))
    news = checked.take_output()
    assert news is not None and news.finished is not None and checked.due() == []
    assert told_text(vocabulary, news) == '{"a": [4, 4'


def test_what_comes_with_held_tokens_is_passed_on_once(
    make: Callable[..., CheckedSequence], vocabulary: Vocabulary
) -> None:
    facts = CacheFacts(cached_tokens=16, reusable_tokens=16)
    along: dict = {"cache_facts": facts, "drafts": {"head": (3, 2)}, "vector": b"4321"}
    checked = make()
    checked.absorb(SequenceOutput(tokens_of(vocabulary, '{"a": [4'), **along))
    checked.absorb(SequenceOutput(tokens_of(vocabulary, ", 5"), drafts={"head": (6, 4)}))
    output = checked.take_output()
    assert output is not None
    assert (output.cache_facts, output.drafts, output.vector) == (facts, {"head": (6, 4)}, b"4321")
    checked.absorb(SequenceOutput(tokens_of(vocabulary, "]}"), finished=ended("length")))
    (due,) = checked.due()
    assert checked.validated(due, errors_of(due), seq_id=2) is None
    output = checked.take_output()
    assert output is not None
    assert (output.cache_facts, output.drafts, output.vector) == (None, None, b"")


def test_the_end_waits_for_the_validation_of_the_whole(
    make: Callable[..., CheckedSequence], vocabulary: Vocabulary
) -> None:
    checked = make(checks=(), final_schema={"required": ["b"]})
    checked.absorb(
        SequenceOutput([*tokens_of(vocabulary, '{"a": 1}'), END_TOKEN], finished=ended())
    )
    news = checked.take_output()
    assert news is not None and news.finished is None
    (due,) = checked.due()
    assert due.id == FINAL_CHECK and due.text == '{"a": 1}'
    assert checked.validated(due, errors_of(due), seq_id=2) is None
    news = checked.take_output()
    assert news is not None and news.finished is not None
    assert checked.violation == "'b' is a required property" == news.finished.violation
