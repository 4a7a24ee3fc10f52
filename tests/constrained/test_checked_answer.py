"""Answers with checks: what is returned is valid, what is told is never taken back, and stubborn
models escape."""

import json
import random
from collections.abc import Callable

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.constrained.grammar import SpanCheck, SpanError
from radixrt.tokenizer.retry.checked_answer import CheckedAnswer, DueCheck, RetriesExhausted
from tests.constrained.checked_decoding import CASES, Case, case, decode, seeds
from tests.suite import examples

BY_NAME = {case.name: case for case in CASES}
MOODS = ["stubborn", "greedy", "sampled", "sampled anew"]
WRONG = [SpanError((), "not", "no")]


def check(*path: str | None) -> SpanCheck:
    return SpanCheck(
        path=path, schema=True, pointer="/" + "/".join(map(str, path)), keywords=("not",)
    )


def answer_of(*texts: str, checks: tuple[SpanCheck, ...], **options: int) -> CheckedAnswer:
    """Token ids are positions, from 100 on."""
    answer = CheckedAnswer(checks, **options)
    answer.push(range(100, 100 + len(texts)), texts)
    return answer


def only(due: list[DueCheck]) -> DueCheck:
    [one] = due
    return one


class Client:
    """Hears what is confirmed, and complains if it is taken back."""

    def __init__(self) -> None:
        self.heard = ""
        self.num_tokens = 0

    def __call__(self, answer: CheckedAnswer) -> None:
        assert answer.num_confirmed_tokens >= self.num_tokens
        assert answer.text.startswith(self.heard)
        self.num_tokens = answer.num_confirmed_tokens
        self.heard = answer.text[: answer.num_confirmed_characters]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("mood", MOODS)
def test_an_answer_is_valid_or_there_is_none(case: Case, mood: str) -> None:
    for seed in seeds(3):
        client, delays = Client(), random.Random(seed)
        outcome = decode(
            case,
            mood,
            seed,
            result_delay=lambda delays=delays: delays.choice([0, 0, 1, 5, 30]),
            watch=client,
            vocabulary_kind=delays.choice(["json", "tiny"]),
            whitespace=delays.random() < 0.3,
        )
        if outcome.text is not None and not outcome.cut_off:
            assert client.heard == outcome.text
            jsonschema.Draft202012Validator(case.schema).validate(json.loads(outcome.text))


ESCAPES = [
    *("uniqueItems: digits", "uniqueItems: eight of ten digits", "uniqueItems: strings"),
    *("uniqueItems: objects", "uniqueItems: lists of lists", "not: a letter"),
    *("not: longer than 2", "not: property together", "not: a kind"),
    *("oneOf: multiples of 2, of 3", "oneOf: by prefix", "dependentRequired: later"),
    *("dependentRequired: earlier", "if/then/else: required"),
]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_model_that_always_prefers_the_same_tokens_escapes(name: str) -> None:
    failed_at_first = 0
    for seed in seeds(10):
        outcome = decode(BY_NAME[name], "stubborn", seed)
        assert outcome.text is not None and not outcome.cut_off
        failed_at_first += outcome.retries > 0
    assert failed_at_first, "the schema is no test for these models"


@pytest.mark.parametrize("mood", MOODS)
def test_what_nothing_satisfies_ends_with_an_error_that_names_the_schema(mood: str) -> None:
    never = case("", {"type": "array", "items": {"type": "integer"}}, {"not": {"type": "array"}})
    outcome = decode(never, mood, 1, max_failures=5)
    assert outcome.text is None and outcome.retries == 5

    answer = answer_of("[", "1", "]", checks=(check(),), max_failures=1)
    assert answer.failed(only(answer.due()).id, WRONG)
    answer.push([101, 102], ["1", "]"])
    with pytest.raises(RetriesExhausted, match="satisfies not at / of the schema: no") as raised:
        answer.failed(only(answer.due()).id, WRONG)
    assert (raised.value.pointer, raised.value.keywords) == ("/", ("not",))
    assert raised.value.errors == WRONG


def test_a_grammar_that_leaves_no_other_value_ends_the_retries_early() -> None:
    forced = case("", {"const": "only"}, {"not": {"const": "only"}})
    outcome = decode(forced, "greedy", 1)
    assert outcome.text is None and outcome.retries < 16


def test_the_whole_answer_has_a_bound_too() -> None:
    outcome = decode(BY_NAME["contains: at least 900"], "stubborn", seeds(1)[0], max_retries=3)
    assert outcome.text is None and outcome.retries == 3


# ---------------------------------------------------------------- points of return


def test_a_failed_value_goes_back_to_where_it_begins_and_its_beginning_is_forbidden() -> None:
    answer = answer_of('{"a', '":', '"x', 'y"', "}", checks=(check("a"),))
    due = only(answer.due())
    assert (due.text, due.check.path) == ('"xy"', ("a",))
    rewind = answer.failed(due.id, WRONG)
    assert rewind is not None and rewind.num_output_kept == 2 and rewind.retries == 1
    assert [102] in rewind.excluded
    assert answer.num_tokens == 2 and answer.text == '{"a":' and answer.retries == 1


def test_the_point_of_return_is_before_a_token_that_holds_the_beginning() -> None:
    answer = answer_of("{", '"a":"', 'x"', "}", checks=(check("a"),))
    rewind = answer.failed(only(answer.due()).id, [SpanError((), "", "")])
    assert rewind is not None and rewind.num_output_kept == 2  # its content can differ from here on
    answer = answer_of("{", '"a":"x', '"', "}", checks=(check("a"),))
    rewind = answer.failed(only(answer.due()).id, WRONG)
    assert rewind is not None and rewind.num_output_kept == 1


def test_tokens_without_text_belong_to_the_character_they_begin() -> None:
    answer = answer_of('{"a":', "", '"é', '"', "}", checks=(check("a"),))
    answer.due()
    assert answer.num_confirmed_tokens == 1
    answer = answer_of('{"a":', "", checks=(check("a"),))
    assert answer.num_confirmed_tokens == 1


def test_results_of_what_was_dropped_are_ignored() -> None:
    answer = answer_of("[", "1", ",", "2", "]", checks=(check(None), check()))
    first, second, whole = answer.due()
    assert answer.failed(first.id, WRONG) is not None
    assert answer.failed(second.id, WRONG) is None
    assert answer.failed(whole.id, WRONG) is None
    answer.passed(second.id)
    assert answer.num_tokens == 1 and answer.due() == [] and answer.retries == 1


def test_an_outer_value_that_fails_takes_inner_ones_that_passed_with_it() -> None:
    answer = answer_of("[", '"a"', ",", '"a"', "]", checks=(check(None), check()))
    *inner, whole = answer.due()
    for due in inner:
        answer.passed(due.id)
    rewind = answer.failed(whole.id, [SpanError((), "uniqueItems", "twice", ((1,),))])
    assert rewind is not None and rewind.num_output_kept == 3
    answer.push([7, 104], ['"b"', "]"])
    assert [due.text for due in answer.due()] == ['"b"', '["a","b"]']


# ---------------------------------------------------------------- what may be told


def test_open_and_unverified_values_are_held_back() -> None:
    answer = CheckedAnswer((check("a"),))
    answer.push([1, 2], ['{"b":1,"a":', ' "x'])
    assert answer.num_confirmed_tokens == 1
    answer.push([3, 4], ['"', ',"c":2'])
    assert answer.num_confirmed_tokens == 1 and answer.num_confirmed_characters == 11
    answer.passed(only(answer.due()).id)
    assert answer.num_confirmed_tokens == 4 and not answer.is_settled
    answer.push([5, 6], ["}", ""])
    answer.finish()
    assert answer.is_settled and answer.num_confirmed_tokens == 6


def test_a_value_that_ends_in_the_token_in_which_the_next_one_begins_waits_for_it() -> None:
    answer = answer_of("[1", "1", ",2", "]", checks=(check(None),))
    first, second = answer.due()
    answer.passed(first.id)
    # To go back to the second number is to open the first one again: it may become 113.
    assert answer.num_confirmed_tokens == 0
    rewind = answer.failed(second.id, WRONG)
    assert rewind is not None and rewind.num_output_kept == 2
    answer.push([9, 10], ["3", "]"])
    due = only(answer.due())
    assert due.text == "113"
    answer.passed(due.id)
    assert answer.num_confirmed_tokens == 4


def test_a_token_that_ends_one_value_and_only_opens_the_next_is_kept_and_told() -> None:
    answer = answer_of('[{"', 'a":1', '},{"', 'b":2', "}]", checks=(check(None),))
    first, second = answer.due()
    answer.passed(first.id)
    assert answer.num_confirmed_tokens == 3
    rewind = answer.failed(second.id, WRONG)
    assert rewind is not None and rewind.num_output_kept == 3


def test_an_answer_that_is_cut_off_is_told_up_to_there_but_for_unverified_values() -> None:
    answer = answer_of('{"a":', "[1", ",2", checks=(check("a"),))
    answer.finish(cut_off=True)
    assert answer.is_settled and answer.num_confirmed_tokens == 3
    answer = answer_of('{"a":', "[1", "]", ',"b', checks=(check("a"),))
    answer.finish(cut_off=True)
    assert not answer.is_settled and answer.num_confirmed_tokens == 1
    assert answer.failed(only(answer.due()).id, WRONG) is not None
    assert not answer.is_settled


def test_an_incomplete_answer_that_was_not_cut_off_is_an_error() -> None:
    with pytest.raises(ValueError, match="ends where"):
        answer_of("[", "1", checks=(check(),)).finish()


def test_a_number_on_its_own_is_checked_at_the_end() -> None:
    answer = answer_of("1", "2", "", checks=(check(),))
    assert answer.due() == []
    answer.finish()
    due = only(answer.due())
    assert due.text == "12" and answer.num_confirmed_tokens == 0
    rewind = answer.failed(due.id, WRONG)
    assert rewind is not None and rewind.num_output_kept == 0


texts = st.lists(
    st.sampled_from(["[[", "[", "1", "2", ",", "],[", "]", "],", '"a"', '"', "", "]]"])
)


def begins_json(text: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema("{}")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text)


@settings(max_examples=examples(300), deadline=None)
@given(texts, st.randoms(use_true_random=False), st.sampled_from([(None,), (None, None), ()]))
def test_nothing_that_was_told_is_taken_back(
    pieces: list[str], luck: random.Random, path: tuple[str | None, ...]
) -> None:
    """Random results, late and out of order, on random text in random tokens."""
    answer, client = CheckedAnswer((check(*path), check(None))), Client()
    waiting: list[DueCheck] = []
    for number, piece in enumerate(pieces):
        if not begins_json(answer.text + piece):
            return  # no grammar would have let it come
        answer.push([number], [piece])
        client(answer)
        waiting += answer.due()
        luck.shuffle(waiting)
        while waiting and luck.random() < 0.5:
            due = waiting.pop()
            if luck.random() < 0.3:
                try:
                    answer.failed(due.id, WRONG)
                except RetriesExhausted:
                    return
            else:
                answer.passed(due.id)
            client(answer)


def test_long_answers_take_linear_work() -> None:
    """Counted, not timed: how often the state machine looks at a passed value again."""
    answer = CheckedAnswer((check("a", None), check()))
    answer.push([1], ['{"a":['])
    looks = count_calls(answer, "_first_token")
    for number in range(2_000):
        answer.push([number, 0], ['"x"', ","])
        for due in answer.due():
            answer.passed(due.id)
        assert answer.num_confirmed_tokens == 0
    assert looks() <= 3 * 2_000


def count_calls(thing: object, name: str) -> Callable[[], int]:
    original, calls = getattr(thing, name), []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return original(*arguments)

    setattr(thing, name, counted)
    return lambda: len(calls)
