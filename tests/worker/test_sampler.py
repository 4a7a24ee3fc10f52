"""The sampler draws from the allowed tokens with the right probabilities, whatever else is in the
batch."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import unpack_ids
from radixrt.messages.steps import NO_TOKEN, SlotLogprobs
from radixrt.worker.sampling.sampler import (
    SampledTokens,
    draw_by_native_kernel,
    draw_by_torch,
    prompt_logprob_rows,
    raw_logprobs,
    sample,
)
from radixrt.worker.sampling.state import SamplingState

VOCAB = 50
NO_TOKENS = np.zeros(0, dtype=np.int32)
NUM_SEEDS = 20
"""Of draws from one row."""


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def on_host(sampled: SampledTokens) -> tuple[np.ndarray, list[SlotLogprobs]]:
    """Token ids and log-probabilities."""
    return sampled.read(sampled.tensors())


def draws(
    logits: torch.Tensor, params: SamplingParams, prompt: np.ndarray, count: int
) -> np.ndarray:
    """``count`` tokens for one row of logits [vocab], each with a seed and a position that no other
    has; by the native kernel where there is one, which takes the tokens of PyTorch's way
    (tests/kernels/test_sampler_kernel.py) in a tenth of its time."""
    state = SamplingState(NUM_SEEDS, len(logits))
    for slot in range(NUM_SEEDS):
        state.admit(slot, replace(params, seed=slot), prompt, 0)
    number = torch.arange(count)
    positions = len(prompt) + number // NUM_SEEDS
    slots = (number % NUM_SEEDS).numpy()
    draw = draw_by_native_kernel if radixrt_kernels.available() else draw_by_torch
    return on_host(sample(state, logits.repeat(count, 1), slots, positions, None, draw))[0]


def deviation(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations by which a chi² test misses; tokens too rare for the test go together."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    present = expected > 0
    assert counts[~present].sum() == 0
    if present.sum() < 2:
        return 0.0
    freedom = present.sum() - 1
    statistic = ((counts - expected)[present] ** 2 / expected[present]).sum()
    return (statistic - freedom) / math.sqrt(2 * freedom)


# ---------------------------------------------------------------- filters, against transformers

FILTERS = {
    "nothing": dict(),
    "temperature": dict(temperature=0.6),
    "hot": dict(temperature=3.0),
    "top_k": dict(top_k=7),
    "top_k of one": dict(top_k=1),
    "top_k beyond the vocabulary": dict(top_k=1000),
    "top_p": dict(top_p=0.8),
    "small top_p": dict(top_p=0.01),
    "min_p": dict(min_p=0.1),
    "top_k and top_p": dict(top_k=9, top_p=0.7, temperature=1.5),
    "all": dict(top_k=20, top_p=0.95, min_p=0.05, temperature=1.3),
}


def warped(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities after transformers' own filters, float64 [vocab]."""
    scores = logits.unsqueeze(0)
    scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.double().softmax(-1)[0].numpy()


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_drawn_with_the_probabilities_of_the_transformers_warpers(name):
    params = SamplingParams(**FILTERS[name])
    logits = random_logits(1)[0]
    assert abs(deviation(draws(logits, params, NO_TOKENS, 4000), warped(logits, params))) < 5


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.3, 0.5, 0.7]),
    temperature=st.floats(0.2, 3.0),
)
def test_support_of_all_filters_together_is_that_of_transformers(
    seed, top_k, top_p, min_p, temperature
):
    """Near-flat logits, so that 600 draws see every token that may come."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits = random_logits(1, vocab=12, seed=seed)[0] / 6 * temperature
    allowed = warped(logits, params)
    borders = np.abs(np.cumsum(np.sort(allowed)[::-1]) - top_p)
    if borders.min() < 1e-5:  # the border token is a matter of rounding
        return
    seen = set(draws(logits, params, NO_TOKENS, 600).tolist())
    assert seen == set(np.flatnonzero(allowed).tolist())


@pytest.mark.parametrize("params", [dict(top_k=5), dict(top_p=0.3), dict(top_k=40, top_p=0.2)])
def test_tokens_that_tie_with_the_last_one_kept_are_kept_too(params):
    logits = torch.zeros(VOCAB)
    tokens = draws(logits, SamplingParams(**params), NO_TOKENS, 2000)
    assert len(set(tokens.tolist())) == VOCAB


def test_a_filter_that_drops_only_what_never_comes_changes_no_token():
    logits = random_logits(1)[0]
    logits[11] = -100.0
    expected = draws(logits, SamplingParams(), NO_TOKENS, 200).tolist()
    for params in (dict(top_k=VOCAB - 1), dict(min_p=1e-20), dict(top_p=0.99999999)):
        assert draws(logits, SamplingParams(**params), NO_TOKENS, 200).tolist() == expected


# ---------------------------------------------------------------- penalties and biases


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    prompt, output = ids(3, 4, 3), ids(9, 4)
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([[3, 4, 3, 9, 4]]), logits.clone()
    )
    state = SamplingState(1, VOCAB)
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    state.admit(0, params, np.concatenate([prompt, output]), len(output))
    assert torch.allclose(processed(state, logits), expected)


def processed(state: SamplingState, logits: torch.Tensor, position: int = 5) -> torch.Tensor:
    """The logits of slot 0 as they are when temperature and filters get them."""
    logits = logits.clone()
    sample(state, logits, [0], torch.tensor([position]))
    return logits


def test_presence_and_frequency_penalties_count_the_answer_and_not_the_prompt():
    logits = random_logits(1)
    state = SamplingState(1, VOCAB)
    params = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    state.admit(0, params, ids(1, 2, 2, 7, 8, 7, 7), 4)
    expected = logits.clone()
    for token, count in Counter([7, 8, 7, 7]).items():
        expected[0, token] -= 0.5 + 0.25 * count
    assert torch.allclose(processed(state, logits), expected)


def test_sampled_tokens_are_counted_from_the_next_step_on():
    state = SamplingState(1, VOCAB)
    state.admit(0, SamplingParams(temperature=0, frequency_penalty=2.0), ids(1), 0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 3.0, 0.5
    chosen = [
        sample(state, logits.clone(), [0], torch.tensor([1 + step])).token_ids.item()
        for step in range(3)
    ]
    assert chosen == [5, 5, 6]


def test_a_slot_used_again_inherits_no_counts_and_no_biases():
    state = SamplingState(2, VOCAB)
    old = SamplingParams(
        temperature=0, presence_penalty=2.0, logit_bias={4: 50.0}, min_tokens=9, stop_token_ids=(6,)
    )
    for slot in (0, 1):
        state.admit(slot, old, ids(1, 2, 3, 4), 2)
        state.release(slot)
    new = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=2.0)
    state.admit(0, new, ids(40), 0)
    logits = random_logits(1)
    changed = (processed(state, logits) != logits).nonzero()[:, 1]
    assert changed.tolist() == [40]


def test_counts_stay_right_when_their_table_grows():
    state = SamplingState(20, VOCAB)
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    for slot in range(20):
        state.admit(slot, params, ids(*[slot] * slot), slot)
    logits = torch.zeros(20, VOCAB)
    sample(state, logits, np.arange(20), torch.arange(20))
    assert torch.equal(-logits.diagonal(), torch.arange(20.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_of_100_forces_a_token_and_of_minus_100_bans_it(temperature):
    logits = random_logits(1)[0]
    best = int(logits.argmax())
    force = SamplingParams(temperature=temperature, logit_bias={17: 100.0})
    ban = SamplingParams(temperature=temperature, logit_bias={best: -100.0})
    assert set(draws(logits, force, NO_TOKENS, 200).tolist()) == {17}
    assert best not in draws(logits, ban, NO_TOKENS, 200)


def test_min_tokens_forbids_what_transformers_forbids():
    eos, prompt = [3, 8], ids(1, 2, 4)
    oracle = MinNewTokensLengthLogitsProcessor(len(prompt), 4, eos, device="cpu")
    for num_output in range(7):
        tokens = np.concatenate([prompt, ids(*[9] * num_output)])
        state = SamplingState(1, VOCAB, eos_token_ids=eos)
        state.admit(0, SamplingParams(temperature=0, min_tokens=4), tokens, num_output)
        logits = random_logits(1)
        expected = oracle(torch.from_numpy(tokens).unsqueeze(0), logits.clone()).isinf()
        assert torch.equal(processed(state, logits, position=len(tokens)) < -1e29, expected)


def test_min_tokens_forbids_stop_tokens_and_under_ignore_eos_only_those():
    logits = random_logits(1)
    for ignore_eos, forbidden in ((False, [3, 20]), (True, [20])):
        state = SamplingState(1, VOCAB, eos_token_ids=[3])
        params = SamplingParams(
            temperature=0, min_tokens=2, stop_token_ids=(20,), ignore_eos=ignore_eos
        )
        state.admit(0, params, ids(1), 0)
        masked = processed(state, logits, position=1) < -1e29
        assert masked[0].nonzero().squeeze(-1).tolist() == forbidden


def test_a_request_that_forbids_its_whole_vocabulary_still_gets_a_token():
    params = SamplingParams(min_tokens=5, stop_token_ids=tuple(range(VOCAB)), temperature=1e-9)
    for extra in (dict(), dict(top_k=3), dict(min_p=0.5)):
        tokens = draws(random_logits(1)[0], replace(params, **extra), NO_TOKENS, 4)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


# ---------------------------------------------------------------- greedy and odd values


def test_greedy_is_the_argmax_and_needs_no_seed():
    logits = random_logits(8)
    state = SamplingState(8, VOCAB)
    for slot in range(8):
        state.admit(slot, SamplingParams(temperature=0.0), ids(1), 0)
    expected = logits.argmax(-1)
    assert torch.equal(
        sample(state, logits, np.arange(8), torch.ones(8).long()).token_ids, expected
    )


def test_a_temperature_close_to_zero_is_greedy_and_overflows_nothing():
    logits = random_logits(1)[0] * 100
    tokens = draws(logits, SamplingParams(temperature=1e-30, top_p=0.9), NO_TOKENS, 50)
    assert set(tokens.tolist()) == {int(logits.argmax())}


def test_sampling_at_random_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed"):
        SamplingState(1, VOCAB).admit(0, SamplingParams(), ids(1), 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [dict(temperature=0), dict(), dict(top_p=0.5), dict(min_p=0.1)])
def test_logits_that_are_not_finite_give_no_token_and_disturb_no_other_row(bad, params):
    state = SamplingState(8, VOCAB)
    for slot in (5, 6):
        state.admit(slot, SamplingParams(seed=1, **params), ids(1), 0)
    logits = random_logits(2)
    logits[1, 30] = bad
    sampled = sample(state, logits, [5, 6], torch.tensor([1, 1]))
    token_ids, _ = on_host(sampled)
    assert token_ids[0] >= 0 and token_ids[1] == NO_TOKEN


# ---------------------------------------------------------------- the batch does not matter

some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([None, None, {3: 2.0, 5: -100.0}]),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (7, 8)]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def toy_model(tokens: list[int]) -> torch.Tensor:
    """Logits [300] that depend on the last two tokens."""
    key = hash((tuple(tokens[-2:]), len(tokens))) % 2**31
    return random_logits(1, vocab=300, seed=key)[0]


class Generation:
    """One sequence driven through a SamplingState that others may share."""

    def __init__(self, state: SamplingState, slot: int, params: SamplingParams, prompt: list[int]):
        self.state, self.slot, self.params = state, slot, params
        self.tokens, self.num_prompt = list(prompt), len(prompt)
        self.logprobs: list = []
        self.admit()

    def admit(self) -> None:
        num_output = len(self.tokens) - self.num_prompt
        self.state.admit(self.slot, self.params, ids(*self.tokens), num_output)


def step(sequences: list[Generation]) -> None:
    sampled = sample(
        sequences[0].state,
        torch.stack([toy_model(s.tokens) for s in sequences]),
        [s.slot for s in sequences],
        torch.tensor([len(s.tokens) for s in sequences]),
    )
    token_ids, rows = on_host(sampled)
    for sequence, token in zip(sequences, token_ids.tolist(), strict=True):
        sequence.tokens.append(token)
        sequence.logprobs += [
            (unpack_ids(r.token_ids).tolist(), r.logprobs) for r in rows if r.slot == sequence.slot
        ]


def alone(params: SamplingParams, prompt: list[int], steps: int) -> Generation:
    sequence = Generation(SamplingState(1, 300, eos_token_ids=[2]), 0, params, prompt)
    for _ in range(steps):
        step([sequence])
    return sequence


prompts = st.lists(st.integers(0, 299), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(some_params, prompts), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_each_sequence_of_a_mixed_batch_gets_what_it_gets_alone(requests, order):
    state = SamplingState(len(requests), 300, eos_token_ids=[2])
    slots = list(range(len(requests)))
    order.shuffle(slots)
    sequences = [
        Generation(state, slot, *request) for slot, request in zip(slots, requests, strict=True)
    ]
    for number in range(5):
        if number % 2:
            order.shuffle(sequences)
        step(sequences)
    for sequence in sequences:
        single = alone(sequence.params, sequence.tokens[: sequence.num_prompt], 5)
        assert sequence.tokens == single.tokens
        for (token_ids, logprobs), expected in zip(sequence.logprobs, single.logprobs, strict=True):
            assert token_ids == expected[0]
            assert logprobs == pytest.approx(expected[1], abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    params=some_params,
    prompt=prompts,
    retract_after=st.lists(st.integers(0, 7), max_size=3),
    other=st.tuples(some_params, prompts),
)
def test_a_retracted_sequence_continues_as_if_it_had_never_left(
    params, prompt, retract_after, other
):
    state = SamplingState(4, 300, eos_token_ids=[2])
    sequence, neighbour = Generation(state, 0, params, prompt), Generation(state, 1, *other)
    for number in range(8):
        step([neighbour, sequence])
        if number in retract_after:
            state.release(sequence.slot)
            sequence.slot = 2 + number % 2
            if number % 3 == 0:  # steps go by without it
                step([neighbour])
            sequence.admit()
    assert sequence.tokens == alone(params, prompt, 8).tokens


def test_different_seeds_and_positions_give_different_tokens():
    logits = torch.zeros(1000)
    tokens = draws(logits, SamplingParams(), NO_TOKENS, 300)
    assert len(set(tokens.tolist())) > 200
    state = SamplingState(1, 1000)
    state.admit(0, SamplingParams(seed=4), ids(1), 0)
    along = {
        sample(state, torch.zeros(1, 1000), [0], torch.tensor([position])).token_ids.item()
        for position in range(300)
    }
    assert len(along) > 200


def test_a_slot_given_to_another_sequence_between_two_steps_follows_the_new_settings():
    state = SamplingState(1, VOCAB)
    logits = random_logits(1)
    for banned in logits[0].topk(3).indices.tolist():
        state.admit(0, SamplingParams(temperature=0, logit_bias={banned: -100.0}), ids(1), 0)
        assert processed(state, logits)[0, banned] < -50
        state.release(0)


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_the_models_own_whatever_the_settings():
    params = SamplingParams(
        temperature=0.3, top_k=2, repetition_penalty=1.5, logit_bias={40: 100.0}, logprobs=4, seed=0
    )
    state = SamplingState(3, VOCAB)
    state.admit(1, SamplingParams(seed=9), ids(1), 0)
    state.admit(2, params, ids(1), 0)
    logits = random_logits(2)
    expected = logits[0].double().log_softmax(-1)
    top = expected.topk(4)
    tokens, rows = on_host(sample(state, logits, [2, 1], torch.tensor([1, 1])))
    assert [row.slot for row in rows] == [2]
    assert tokens[0] == 40
    assert unpack_ids(rows[0].token_ids).tolist() == [40, *top.indices.tolist()]
    assert rows[0].logprobs == pytest.approx([expected[40].item(), *top.values.tolist()], abs=1e-5)


def test_each_slot_gets_as_many_alternatives_as_it_asked_for():
    state = SamplingState(3, VOCAB)
    for slot, wanted in enumerate((0, None, 5)):
        state.admit(slot, SamplingParams(temperature=0, logprobs=wanted), ids(1), 0)
    _, rows = on_host(sample(state, random_logits(3), [0, 1, 2], torch.ones(3).long()))
    assert [(row.slot, len(row.logprobs)) for row in rows] == [(0, 1), (2, 6)]


def test_prompt_logprobs_name_the_next_token_first_then_the_likeliest():
    logits, tokens = random_logits(4), torch.tensor([3, 1, 4, 1])
    expected = logits.double().log_softmax(-1)
    ids, values = raw_logprobs(logits.bfloat16().float(), tokens, num_top=2)
    rows = prompt_logprob_rows(ids, values, slot=7, num_top=2)
    assert len(rows) == 4
    for row, reference, token in zip(rows, expected, tokens.tolist(), strict=True):
        top = reference.topk(2)
        assert row.slot == 7
        assert unpack_ids(row.token_ids).tolist() == [token, *top.indices.tolist()]
        assert row.logprobs == pytest.approx(
            [reference[token].item(), *top.values.tolist()], abs=0.1
        )


def test_more_alternatives_than_tokens_is_all_tokens():
    ids, values = raw_logprobs(torch.zeros(1, 3), torch.tensor([2]), num_top=20)
    assert len(prompt_logprob_rows(ids, values, slot=0, num_top=20)[0].logprobs) == 4
