"""The sources of drafts, the rule for their number, and their verification, against brute force."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import DRAFTERS, MAX_DRAFTED, Admit, DraftSources
from radixrt.worker.drafts import drafters
from radixrt.worker.drafts.drafters import (
    MAX_EXITS,
    CopyExits,
    Draft,
    NgramDrafter,
    PoolDrafter,
    ReferenceDrafter,
)
from radixrt.worker.drafts.price import Chance, Chances
from radixrt.worker.drafts.speculator import REST_AFTER_DEFERRAL, Speculator
from radixrt.worker.drafts.suffix_index import (
    AGAIN,
    CANDIDATES,
    DIFFERENTLY,
    LONGEST_MATCH,
    ONCE,
    SuffixIndex,
    SuffixMatch,
)
from radixrt.worker.drafts.verification import NO_DRAFT, rows_to_keep, tokens_before

NOTHING = DraftSources()

# ------------------------------------------------------------ the index


def best_place(text: list[int], ending: list[int]) -> SuffixMatch | None:
    """By looking at every place of the text."""
    places = [
        place
        for place in range(2, len(text))
        if len(ending) >= 2 and text[place - 2 : place] == ending[-2:]
    ][-CANDIDATES:]
    best = None if places or len(ending) < 2 else single_place(text, ending[-1])
    for place in reversed(places):
        most = min(place, len(ending), LONGEST_MATCH)
        length = 0
        while length < most and text[place - 1 - length] == ending[-1 - length]:
            length += 1
        if best is None or length > best.length:
            best = SuffixMatch(place, length)
    return best


def single_place(text: list[int], token: int) -> SuffixMatch | None:
    """The last place behind a token, the first of the text apart, and how the token was followed
    there and before."""
    places = [place for place in range(2, len(text)) if text[place - 1] == token]
    if not places:
        return None
    followed = ONCE
    if len(places) > 1:
        followed = AGAIN if text[places[-1]] == text[places[-2]] else DIFFERENTLY
    return SuffixMatch(places[-1], 1, followed)


@pytest.mark.parametrize("num_tokens", [2, 3, 20, 60])
def test_the_index_finds_the_longest_of_the_last_matches(num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    found = 0
    for _ in range(100):
        text: list[int] = []
        index = SuffixIndex(text)
        for _ in range(20):
            text += [rng.randrange(num_tokens) for _ in range(rng.randint(0, 12))]
            if rng.random() < 0.3 and len(text) > 4:  # repeat a stretch
                start = rng.randrange(len(text) - 2)
                text += text[start : start + rng.randint(2, 50)]
            other = [rng.randrange(num_tokens) for _ in range(rng.randint(0, 6))]
            for ending in (text, other, text[: rng.randint(0, len(text))]):
                match = index.find(ending)
                assert match == best_place(text, ending), (text, ending)
                found += match is not None
    assert found > 1000


# ------------------------------------------------------------ the drafters


def test_ngrams_go_on_as_the_text_did_before() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2]
    drafter = NgramDrafter()
    drafter.admit(0, text, 6, NOTHING)
    assert drafter.propose(0, 3) == Draft([3, 4, 5], kind_of(2))
    assert drafter.propose(0, 2, ahead=[3, 4]) == Draft([5, 9], kind_of(4))
    text += [3, 7]
    assert drafter.propose(0, 3) is None
    text += [8, 3, 7]
    assert drafter.propose(0, 9) == Draft([8, 3, 7] * 3, kind_of(2))  # a text that repeats itself
    text += [9]
    assert drafter.propose(0, 3) == Draft([1, 2, 3], ONCE)  # one token agrees


def kind_of(num_agreeing: int) -> int:
    return SuffixMatch(0, num_agreeing).kind


def test_what_comes_at_the_end_of_a_copy_is_drafted_when_it_has_come_twice() -> None:
    """The prompt says "a is 5 . b is 6 . c is 7 .", the answers a comma where it has its full
    stop."""
    is_, stop, comma = 50, 51, 52
    prompt = [61, 1, is_, 5, stop, 2, is_, 6, stop, 3, is_, 7, stop, 60]
    drafter, text = NgramDrafter(), list(prompt)
    drafter.admit(0, text, len(prompt), DraftSources(root=CacheRoot(salt="a")))
    for token, value in ((1, 5), (2, 6)):
        text += [token]
        assert drafter.propose(0, 4) == Draft(prompt[prompt.index(token) + 1 :][:4], ONCE)
        text += [is_, value, comma, 60]
    text += [3, is_]
    assert drafter.propose(0, 9) == Draft([7], kind_of(2))
    assert (left := drafter.propose(0, 9, ahead=[7])) is not None
    assert left.token_ids == [comma] and left.kind > kind_of(LONGEST_MATCH)
    assert drafter.propose(0, 2, ahead=[7, comma]) == Draft([60, 3], AGAIN)

    def drafted(salt: str | None) -> list[int]:
        drafter.admit(
            1,
            [*prompt, 3, is_],
            len(prompt),
            DraftSources(root=None if salt is None else CacheRoot(salt=salt)),
        )
        draft = drafter.propose(1, 2)
        assert draft is not None
        return draft.token_ids

    assert drafted("a") == [7]
    assert drafted("b") == drafted(None) == [7, stop]  # no salt learns from another


def test_exits_are_forgotten_when_they_do_not_come_and_are_bounded() -> None:
    exits = CopyExits()

    def come(token: int, times: int) -> int | None:
        for _ in range(times):
            exits.observe(5, token, copies=True)
        return exits.first_in([4, 5])

    assert come(6, 1) is None and come(6, 1) == 1
    assert come(6, 9) == 1 and come(7, 2) == 1 and come(7, 1) is None
    assert come(7, 3) == 1 and exits.by_token[5].token == 7
    assert come(5, 9) is None and not exits.by_token
    exits.observe(5, 6, copies=False)
    assert not exits.by_token
    for token in range(2 * MAX_EXITS):
        exits.observe(token, token + 1, copies=True)
    assert list(exits.by_token) == list(range(MAX_EXITS, 2 * MAX_EXITS))


def test_of_a_very_long_prompt_the_end_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "MAX_INDEXED", 8)
    drafter = NgramDrafter()
    drafter.admit(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7, 8], 12, NOTHING)
    drafter.admit(1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2], 12, NOTHING)
    assert drafter.propose(0, 2) == Draft([9, 10], kind_of(2))
    assert drafter.propose(1, 2) is None


def test_a_reference_is_followed_and_found_again() -> None:
    reference = [4, 5, 6, 7, 8, 9, 10, 11]
    drafter = ReferenceDrafter(lambda sources: sources.continuation)
    text = [1, 2, 3]
    drafter.admit(0, text, 3, DraftSources(continuation=pack_ids(reference)))
    drafter.admit(1, [1], 1, NOTHING)
    assert drafter.propose(1, 4) is None
    assert drafter.propose(0, 2) == Draft([4, 5], 0)
    text += [4, 5]
    assert drafter.propose(0, 2) == Draft([6, 7], 2)
    assert drafter.propose(0, 2, ahead=[6, 7]) == Draft([8, 9], 2)
    assert drafter.propose(0, 2, ahead=[6, 8]) is None
    text += [6, 99]
    assert drafter.propose(0, 2) is None
    text += [8, 9]
    assert drafter.propose(0, 8) == Draft([10, 11], 2)
    text += [10, 11]
    assert drafter.propose(0, 8) is None


def test_a_prediction_begins_with_the_answer_also_if_that_goes_on_elsewhere() -> None:
    drafter = ReferenceDrafter(lambda sources: sources.prediction, begins_answer=True)
    drafter.admit(0, [1, 2, 7, 8], 2, DraftSources(prediction=pack_ids([7, 8, 9, 10])))
    assert drafter.propose(0, 8) == Draft([9, 10], 2)


def test_a_pool_serves_its_salt_alone_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "MAX_POOL_TOKENS", 40)
    monkeypatch.setattr(drafters, "MAX_ROOTS", 2)
    drafter = PoolDrafter()

    def answer(salt: str | None, tokens: list[int]) -> None:
        drafter.admit(
            0, [0, 1, *tokens], 2, DraftSources(root=None if salt is None else CacheRoot(salt=salt))
        )
        drafter.release(0)

    def ask(salt: str | None, ending: list[int]) -> list[int] | None:
        drafter.admit(
            1, ending, 0, DraftSources(root=None if salt is None else CacheRoot(salt=salt))
        )
        draft = drafter.propose(1, 3)
        drafter._slots.pop(1, None)
        return None if draft is None else draft.token_ids

    answer("a", [11, 12, 13, 14, 15])
    answer("a", [21, 22, 23])
    answer(None, [31, 32, 33, 34])
    assert ask("a", [11, 12, 13]) == [14, 15]  # and nothing of the next answer
    assert ask("a", [9, 9, 13]) == [14, 15]
    assert ask("a", [9, 9, 15]) is None
    assert ask("a", [5, 6, 0, 1, 21]) == [22, 23]  # its prompt ended alike
    assert ask("b", [11, 12, 13]) is None
    assert ask(None, [31, 32, 33]) is None
    for start in range(100, 200, 10):
        answer("a", list(range(start, start + 10)))
    assert ask("a", [11, 12, 13]) is None
    assert ask("a", [190, 191, 192]) == [193, 194, 195]
    assert len(drafter._pools[CacheRoot(salt="a")].text) <= 40
    answer("b", [1, 2, 3, 4])
    answer("c", [1, 2, 3, 4])
    assert [root.salt for root in drafter._pools] == ["b", "c"]


# ------------------------------------------------------------ the number of drafts


@pytest.mark.parametrize("price", [0.02, 0.05, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("first", [0.01, 0.25, 0.5, 0.9, 0.995])
@pytest.mark.parametrize("later", [0.01, 0.5, 0.9, 0.995])
def test_rows_are_added_while_they_pay(price: float, first: float, later: float) -> None:
    chance = Chance(first, later)
    survivals = [first * later**row for row in range(MAX_DRAFTED)]
    assert chance.paying_length(price, MAX_DRAFTED) == sum(s > price for s in survivals)
    for most in range(4):
        assert chance.expected_accepted(most) == pytest.approx(sum(survivals[:most]))
    assert [chance.survival(row + 1) for row in range(3)] == pytest.approx(survivals[:3])


def test_chances_are_learned_for_each_kind_of_evidence() -> None:
    chances = Chances()
    assert chances.estimate((2, 3)) == (0.5, 0.5)
    for _ in range(50):
        chances.learn((2, 3), num_tried=4, num_right=0)
        chances.learn((2, 6), num_tried=4, num_right=4)
    assert chances.estimate((2, 3)).first < 0.05 and chances.estimate((2, 3)).later == 0.5
    assert min(chances.estimate((2, 6))) > 0.95
    assert chances.estimate((1, 3)) == (0.5, 0.5)


def test_the_fate_of_tokens_behind_a_rejected_one_is_not_counted() -> None:
    chances = Chances()
    for _ in range(500):
        chances.learn((0, 0), num_tried=30, num_right=2)
    assert chances.estimate((0, 0)).first > 0.95
    assert chances.estimate((0, 0)).later == pytest.approx(0.5, abs=0.02)


def test_the_chance_of_further_tokens_is_learned_again_after_it_was_low() -> None:
    """Where only the first token pays, nothing is learned of those behind it, so what was learned
    is forgotten."""
    chances = Chances()
    for _ in range(20):
        chances.learn((0, 0), num_tried=4, num_right=1)
    assert chances.estimate((0, 0)).paying_length(0.3, 9) == 1
    for _ in range(200):
        chances.learn((0, 0), num_tried=1, num_right=1)
    assert chances.estimate((0, 0)).paying_length(0.3, 9) > 1


def speculator(
    allowed: Callable[[int, list[int]], list[int]] = lambda _, draft: draft,
) -> Speculator:
    return Speculator((2,), lambda slot: [], allowed)


def admit(text: list[int], max_tokens: int = 100, **sources: object) -> Admit:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    drafts = DraftSources(**sources)  # type: ignore[arg-type]
    return Admit(0, pack_ids(text), 0, b"", sampling, 0, drafts=drafts)


def say(one: Speculator, *token_ids: int) -> None:
    """Let the answer go on."""
    one.extend(np.zeros(len(token_ids), np.int64), np.array(token_ids, np.int32))


def test_drafts_that_fail_stop_and_come_back_when_they_would_have_been_right() -> None:
    """No row is spent to find that out: the answer shows whether what was not drafted was right."""
    one = speculator()
    one.admit(admit([5, 6, 7, 5, 6], max_tokens=10_000))
    drafted = []
    for number in range(60):  # "5, 6" is followed by another token each time
        drafted.append(len(one.propose(0, 30, 0.3)))
        say(one, 100 + number)
        say(one, 5, 6)
    assert drafted[0] > 0 and not any(drafted[20:])
    times = 0
    while not (draft := one.propose(0, 30, 0.3)):
        say(one, 7, 5, 6)
        times += 1
    assert draft == [7] and 0 < times < 30
    (verified, *_) = one.verified(0, len(draft), len(draft))
    assert verified.drafter == DRAFTERS.index("ngram")


def test_of_a_draft_that_pays_in_part_the_rest_is_judged_too() -> None:
    one = speculator()
    one.admit(admit([1, 2, 3], max_tokens=10_000, continuation=pack_ids(list(range(100, 180)))))
    lengths = []
    for step in range(8):
        lengths.append(len(one.propose(0, 30, 0.8)))
        say(one, *range(100 + 10 * step, 110 + 10 * step))  # grammars force tokens
    assert lengths[0] == 1 and lengths[-1] > 3, lengths


def test_drafts_keep_within_the_answer_the_pages_and_the_grammar() -> None:
    followed = list(range(100, 140))
    one = speculator()
    one.admit(admit([1, 2, 3], continuation=pack_ids(followed)))
    assert one.propose(0, 3, 0.0) == followed[:3]
    assert one.propose(0, 0, 0.0) == one.propose(0, -5, 0.0) == []
    assert len(one.propose(0, 1000, 0.0)) == MAX_DRAFTED
    one.admit(admit([1, 2, 3], max_tokens=4, continuation=pack_ids(followed)))
    assert one.propose(0, 1000, 0.0) == followed[:3]  # the fourth is drawn
    one.admit(admit([1, 2, 3], continuation=pack_ids([100, 101, 2, 103])))
    assert one.propose(0, 1000, 0.0) == [100, 101]  # 2 ends the answer
    one = speculator(lambda _, draft: draft[:1])
    one.admit(admit([1, 2, 3], continuation=pack_ids(followed)))
    assert one.propose(0, 1000, 0.0) == [100]


def test_a_draft_may_have_stretches_of_several_drafters() -> None:
    """The tree's continuation ends, the prompt goes on, and each stretch is counted and learned for
    itself."""
    tree, ngram = (DRAFTERS.index("tree"), 0), (DRAFTERS.index("ngram"), ONCE)
    one = speculator()
    one.admit(admit([1, 2, 20, 21, 22, 3], continuation=pack_ids([20])))
    assert one.propose(0, 3, 0.0) == [20, 21, 22]
    entries = one.verified(0, 3, 2)
    names = [(DRAFTERS[e.drafter], e.num_drafted, e.num_accepted) for e in entries]
    assert names == [("tree", 1, 1), ("ngram", 2, 1)]
    say(one, 20, 21, 3)
    one.propose(0, 3, 0.0)
    assert one._chances.estimate(tree).first > 0.85 and min(one._chances.estimate(ngram)) < 0.75
    one.admit(admit([1, 2, 20, 21, 22, 3], continuation=pack_ids([20])))
    learned = one._chances.estimate(ngram)
    assert one.propose(0, 3, 0.0) == [20, 21, 22]
    entries = one.verified(0, 2, 0)  # a grammar has cut it
    assert [(e.num_drafted, e.num_accepted) for e in entries] == [(1, 0), (1, 0)]
    say(one, 9)
    one.propose(0, 3, 0.0)
    assert one._chances.estimate(ngram) == learned  # it was not reached
    one.admit(admit([1, 2, 20, 21, 22, 3], continuation=pack_ids([20])))
    assert one.propose(0, 3, 0.6) == [20]  # the second stretch does not pay


def test_a_sequence_whose_mask_was_late_rests() -> None:
    one = speculator()
    one.admit(admit([1, 2, 3], continuation=pack_ids([4, 5, 6])))
    one.defer([0, 7])
    assert [one.propose(0, 9, 0.0) for _ in range(REST_AFTER_DEFERRAL)] == [
        []
    ] * REST_AFTER_DEFERRAL
    assert one.propose(0, 9, 0.0) == [4, 5, 6]


def test_nothing_is_drafted_behind_the_end_of_an_answer() -> None:
    """A step that was planned before the end is known computes one row of the sequence, and no
    more."""
    one = speculator()
    one.admit(admit([1, 2, 3], continuation=pack_ids([4, 5, 6])))
    one.extend(np.array([0]), np.array([4], np.int32))
    assert one.propose(0, 9, 0.0) == [5, 6]
    one.extend(np.array([0]), np.array([2], np.int32))  # ends the answer
    assert one.propose(0, 9, 0.0) == []


def test_a_sequence_without_sources_is_not_drafted() -> None:
    one = speculator()
    plain = Admit(
        0, pack_ids([1, 2, 1, 2]), 0, b"", SamplingParams(temperature=0.0, max_tokens=9), 0
    )
    one.admit(plain)
    assert one.propose(0, 9, 0.0) == []
    assert one.slots_of(np.array([0])) == []


# ------------------------------------------------------------ verification


def test_rows_are_kept_up_to_the_first_draft_that_was_not_drawn() -> None:
    rng = random.Random(3)
    for _ in range(500):
        token_ids, drafted, unfilled, expected = [], [], [], []
        for _ in range(rng.randint(1, 4)):
            draft = [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            goes_on = True
            for place in range(len(draft) + 1):
                row = len(token_ids)
                if place and rng.random() < 0.1:
                    unfilled.append(row)
                    goes_on = False
                if goes_on:
                    expected.append(row)
                token_ids.append(rng.randrange(3))
                drafted.append(draft[place] if place < len(draft) else NO_DRAFT)
                goes_on = goes_on and token_ids[-1] == drafted[-1]
        kept = rows_to_keep(np.array(token_ids), np.array(drafted), np.array(unfilled, np.int64))
        assert kept.tolist() == expected


def test_a_row_counts_the_drafts_before_it_in_its_own_slot() -> None:
    drafted = np.array([4, 5, NO_DRAFT, NO_DRAFT, 6, NO_DRAFT])
    rows, tokens = tokens_before(np.array([0, 2, 3, 5]), drafted)
    assert rows.tolist() == [1, 1, 3] and tokens.tolist() == [4, 5, 6]
