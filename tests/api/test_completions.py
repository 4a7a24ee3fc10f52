"""Completions through the openai client: whole, streamed, several at once, with
log-probabilities."""

import pytest
from openai import BadRequestError

from radixrt.messages.ids import unpack_ids
from tests.api.conftest import RunningServer, StartServer, wait_until
from tests.servers.fake_scheduler import engine_info


def test_a_completion_stops_at_its_limit(server: RunningServer) -> None:
    server.answer_endlessly("the ")
    answer = server.openai.completions.create(model="tiny", prompt="hi", max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_the_default_limit_is_openais(server: RunningServer) -> None:
    server.answer_endlessly()
    server.openai.completions.create(model="tiny", prompt="hi")
    assert server.scheduler.requests[-1].sampling.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_answers_are_told_apart(
    server: RunningServer, stream: bool
) -> None:
    """The scripted scheduler repeats each prompt's own tokens."""
    server.scheduler.script = lambda request: unpack_ids(request.token_ids).tolist()
    prompts = ["Hello world", "naïve café", "你好 世界"]
    lengths = [len(server.vocabulary.encode(p, add_special_tokens=False)) for p in prompts]
    for prompt, length in zip(prompts, lengths, strict=True):
        body = {"model": "tiny", "max_tokens": length, "n": 2, "stream": stream}
        answer = server.openai.completions.create(prompt=[prompt, prompt], **body)
        texts = ["", "", "", ""]
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [prompt] * 4


def test_token_ids_go_in_and_come_out(server: RunningServer) -> None:
    server.scheduler.script = lambda request: [10, 11, 12, 1]
    answer = server.openai.completions.create(
        model="tiny", prompt=[[20, 21], [22]], extra_body={"return_token_ids": True}
    )
    assert [unpack_ids(r.token_ids).tolist() for r in server.scheduler.requests] == [[20, 21], [22]]
    assert [choice.token_ids for choice in answer.choices] == [[10, 11, 12, 1]] * 2
    assert [choice.prompt_token_ids for choice in answer.choices] == [[20, 21], [22]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_token_borders_ends_the_answer_and_frees_the_sequence(
    server: RunningServer, stream: bool
) -> None:
    server.answer_endlessly("Hello world. ")
    answer = server.openai.completions.create(
        model="tiny", prompt="hi", max_tokens=300, stop=["o wor"], stream=stream
    )
    choices = [c for chunk in (answer if stream else [answer]) for c in chunk.choices]
    assert "".join(c.text for c in choices) == "Hell"
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "o wor")
    wait_until(lambda: len(server.scheduler.released) == 1)


def test_a_stop_token_is_named_but_the_models_own_end_is_not(server: RunningServer) -> None:
    server.scheduler.script = lambda request: [50, 51, 60]
    answer = server.openai.completions.create(
        model="tiny", prompt="hi", extra_body={"stop_token_ids": [60]}
    )
    assert answer.choices[0].stop_reason == 60
    assert answer.choices[0].text == server.vocabulary.decode([50, 51])
    server.answer_with("Hello")
    answer = server.openai.completions.create(model="tiny", prompt="hi")
    assert answer.choices[0].stop_reason is None and answer.choices[0].text == "Hello"


def test_fields_beyond_openais_reach_the_scheduler(server: RunningServer) -> None:
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [60], "cache_salt": "tenant", "timeout": 100,
        "allowed_token_ids": [50, 60], "bad_words": ["the"],
    }  # fmt: skip
    server.openai.completions.create(
        model="tiny", prompt="hi", seed=7, logit_bias={"5": -100}, max_tokens=4, extra_body=extra
    )
    request = server.scheduler.requests[-1]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.2)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.seed) == (2, True, 7)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((60,), {5: -100.0})
    assert sampling.allowed_token_ids == (50, 60)
    own = server.vocabulary.encode
    assert sampling.bad_words_token_ids == (tuple(own("the", False)), tuple(own(" the", False)))
    assert request.options.root.salt == "tenant" and request.options.deadline is not None


def test_answers_of_one_seeded_request_have_seeds_of_their_own_and_always_the_same(
    server: RunningServer,
) -> None:
    for _ in range(2):
        server.openai.completions.create(model="tiny", prompt="hi", n=3, seed=7)
    seeds = [r.sampling.seed for r in server.scheduler.requests]
    assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3 and seeds[0] == 7


def test_the_checkpoints_defaults_hold_where_the_client_says_nothing(
    start_server: StartServer,
) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 5}
    server = start_server(engine_info(default_sampling=defaults))
    server.answer_with("Hello")
    server.openai.completions.create(model="tiny", prompt="hi", top_p=0.5)
    sampling = server.scheduler.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(server: RunningServer, stream: bool) -> None:
    server.answer_with("Hello")
    answer = server.openai.completions.create(
        model="tiny", prompt="the fox", echo=True, logprobs=2, stream=stream
    )
    choices = [c for chunk in (answer if stream else [answer]) for c in chunk.choices]
    tokens = [t for c in choices for t in c.logprobs.tokens]
    values = [v for c in choices for v in c.logprobs.token_logprobs]
    offsets = [o for c in choices for o in c.logprobs.text_offset]
    assert "".join(c.text for c in choices) == "the foxHello"
    assert "".join(tokens) == "the foxHello<|im_end|>"
    assert values[0] is None and set(values[1:]) == {0.0}
    assert [len("".join(tokens[:i])) for i in range(len(tokens))] == offsets
    assert choices[0].logprobs.top_logprobs[0 if not stream else 1] is None or stream


def test_a_prompt_can_be_scored_without_an_answer(server: RunningServer) -> None:
    answer = server.openai.completions.create(
        model="tiny", prompt="the fox", echo=True, logprobs=0, max_tokens=0
    )
    choice = answer.choices[0]
    assert choice.text == "the fox" and "".join(choice.logprobs.tokens) == "the fox"
    assert answer.usage.completion_tokens == 0


def test_a_stream_tells_its_usage_where_asked(server: RunningServer) -> None:
    plain = server.openai.completions.create(model="tiny", prompt="hi", stream=True)
    assert all(chunk.usage is None for chunk in plain)
    with_usage = list(
        server.openai.completions.create(
            model="tiny", prompt="hi", stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage is not None for chunk in with_usage] == [False] * (len(with_usage) - 1) + [
        True
    ]
    assert with_usage[-1].usage.prompt_tokens_details.cached_tokens == 7


def test_a_priority_reaches_the_scheduler_where_the_queue_is_ordered_by_it(
    server: RunningServer, start_server: StartServer
) -> None:
    ordered = start_server(schedule_policy="priority")
    ordered.openai.completions.create(model="tiny", prompt="hi", extra_body={"priority": -3})
    assert ordered.scheduler.requests[-1].options.priority == -3
    with pytest.raises(BadRequestError, match="2147483647"):
        ordered.openai.completions.create(model="tiny", prompt="hi", extra_body={"priority": 2**40})
    server.openai.completions.create(model="tiny", prompt="hi", extra_body={"priority": 0})
    with pytest.raises(BadRequestError, match="--schedule-policy priority"):
        server.openai.completions.create(model="tiny", prompt="hi", extra_body={"priority": 1})
