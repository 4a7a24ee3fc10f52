"""The offline door: ``LLM`` with real processes behind it."""

import gc
import io
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from radixrt import LLM, SamplingParams
from radixrt.base.errors import ConfigError, EngineDiedError, RequestError
from radixrt.messages.requests import ChatPrompt
from radixrt.offline.prompt_forms import chat_of
from radixrt.offline.requests import DEFAULT_MAX_TOKENS

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tiny_llm: LLM) -> Path:
    return Path(tiny_llm.config.model_path)


@pytest.fixture
def llm(tiny_llm: LLM) -> LLM:
    return tiny_llm


@pytest.fixture(scope="module")
def transformers_answer(model_dir: Path) -> Callable[[list[int]], list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def answer(ids: list[int]) -> list[int]:
        settings = {
            "max_new_tokens": 16,
            "min_new_tokens": 16,
            "do_sample": False,
            "eos_token_id": None,
        }
        return model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()

    return answer


def test_images_of_chats_are_read_as_from_http() -> None:
    url = "data:image/png;base64,aGk="
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    prompt = chat_of([{"role": "user", "content": parts}, {"role": "assistant", "content": "It"}])
    assert prompt.messages[0]["content"] == [{"type": "image", "data": "aGk="}, parts[1]]
    with pytest.raises(RequestError, match="fetches no images"):
        chat_of([{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}])


@pytest.mark.parametrize("unconditional", [False, True])
def test_choices_are_as_likely_as_transformers_finds_them(
    llm: LLM, model_dir: Path, unconditional: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompt, choices = "one two three", [" four", " five six", " two one"]
    whole = [tokenizer(prompt + choice)["input_ids"] for choice in choices]
    found = llm.score(prompt, choices, unconditional=unconditional)
    for ids, score in zip(whole, found.scores, strict=True):
        start = len(ids) - len(score.logprobs)
        assert 1 <= start <= len(tokenizer(prompt)["input_ids"])
        assert score.logprobs == pytest.approx(logprobs(model, ids)[start:], abs=1e-3)
        if unconditional:
            bare = logprobs(model, ids[:1] + ids[start:])[1:]
            assert score.unconditional_logprobs == pytest.approx(bare, abs=1e-3)
        else:
            assert score.unconditional_logprobs is None


def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Of each token behind those before it; 0 for the first one."""
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [0.0] + [float(rows[at, token]) for at, token in enumerate(ids[1:])]


def test_scoring_nothing_is_refused(llm: LLM) -> None:
    for choices in ([], ["a", ""]):
        with pytest.raises(RequestError, match="choices"):
            llm.score("one two", choices)


def test_answers_come_in_the_order_of_the_prompts(
    llm: LLM, transformers_answer: Callable[[list[int]], list[int]]
) -> None:
    prompts = [[5 + i, 9, 100 + i] for i in range(20)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [transformers_answer(p) for p in prompts]
    assert {output.finish_reason for output in outputs} == {"length"}


def test_one_text_gives_one_output_and_the_second_time_from_the_cache(llm: LLM) -> None:
    first = llm.generate("One document, many questions.", GREEDY)
    second = llm.generate("One document, many questions.", GREEDY)
    assert first.text == second.text
    assert second.num_prompt_tokens == first.num_prompt_tokens
    assert second.cached_tokens >= second.num_prompt_tokens - 4


def test_the_answer_to_a_text_ends_without_parameters_too(llm: LLM) -> None:
    """And not at the end of the context; that of a chat or with parameters may be as long."""
    assert llm.info.context_length > DEFAULT_MAX_TOKENS + 10
    output = llm.generate("once")
    *_, last = llm.stream("once")
    assert (
        len(output.token_ids) <= DEFAULT_MAX_TOKENS
        and last.report is not None
        and last.report.output_tokens <= DEFAULT_MAX_TOKENS
    )
    endless = SamplingParams(temperature=0, ignore_eos=True)
    whole = llm.generate("once", endless)
    assert whole.num_prompt_tokens + len(whole.token_ids) == llm.info.context_length
    default = llm._requests.default_sampling(None, None)
    assert default.max_tokens == DEFAULT_MAX_TOKENS
    assert llm._requests.default_sampling(ChatPrompt(messages=[]), None).max_tokens is None


def test_each_prompt_may_have_its_own_settings(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 5, 9)]
    assert [len(o.token_ids) for o in llm.generate(["a", "b", "c"], params)] == [1, 5, 9]
    with pytest.raises(RequestError, match="3 prompts came with 2"):
        llm.generate(["a", "b", "c"], params[:2])


def test_n_answers(llm: LLM) -> None:
    output = llm.generate("a", SamplingParams(n=3, max_tokens=8, seed=1))
    assert len(output.answers) == 3 and len({answer.text for answer in output.answers}) > 1


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is it?"}]
    rendered = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat(messages, GREEDY).text == llm.generate(rendered, GREEDY).text
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_stream_yields_the_whole_text_in_pieces(llm: LLM) -> None:
    # Sampled, and new to the cache: drafts would bring many tokens in a piece.
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=16, ignore_eos=True)
    chunks = list(llm.stream("abc", sampled, cache_salt="stream"))
    assert "".join(chunk.text for chunk in chunks) == llm.generate("abc", sampled).text
    assert chunks[-1].finish_reason == "length" and len(chunks) > 3


def test_leaving_a_stream_early_aborts_it(llm: LLM) -> None:
    for _ in llm.stream("abc", SamplingParams(max_tokens=400, ignore_eos=True)):
        break
    deadline = time.monotonic() + 5
    while llm.stats().running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert llm.stats(check_invariants=True).running == 0


def test_an_invalid_prompt_names_its_fault_and_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match="512"):
        llm.generate([[5] * 10, [5] * 600], GREEDY)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("a", SamplingParams(temperature=-1.0))
    deadline = time.monotonic() + 5
    while llm.stats().running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert llm.stats(check_invariants=True).running == 0


VLLMS: dict[str, Any] = {
    "max_model_len": 512, "tensor_parallel_size": 1, "seed": None, "gpu_memory_utilization": 0.5,
    "quantization": None, "revision": None, "enforce_eager": True, "disable_log_stats": True, "dtype": "auto",
}  # fmt: skip
"""Arguments of vLLM's ``LLM``."""


def test_answers_do_not_depend_on_overlap_cache_or_queue_order_and_a_forgotten_engine_leaves_no_process(
    llm: LLM, model_dir: Path
) -> None:
    """Its arguments may be those of vLLM's."""
    prompts = [[5 + i % 3, 9, 100] * 5 + [i] for i in range(3, 12)]
    settings: dict[str, Any] = {
        "debug_disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "schedule_policy": "fcfs",
    }
    plain = LLM(model=str(model_dir), **VLLMS, **settings, max_running_requests=2)
    assert plain.info.context_length == 512 and plain.config.mem_fraction_static == 0.5
    outputs = plain.generate(prompts, GREEDY)
    assert plain.stats().pages_cached == 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts, GREEDY)]
    assert {o.cached_tokens for o in outputs} == {0}
    family = [psutil.Process(pid) for pid in plain._engine.pids.values()]
    assert len(family) == 3
    del plain
    gc.collect()
    _, alive = psutil.wait_procs(family, 10)
    assert not alive


def test_two_tensor_parallel_ranks_answer_like_one_and_the_death_of_one_is_told(
    llm: LLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if stderr is gone, where the processes' logs would be shown."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    prompts = [[5 + i, 9, 100 + i] for i in range(6)]
    # 48: after 31 drafts that do not pay, a token is drafted whatever the times of steps say
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=48, ignore_eos=True)
    with LLM(str(model_dir), tp=2, max_total_tokens=4096, log_level="debug") as parallel:
        assert len(parallel._engine.pids) == 3 + 1
        family = [psutil.Process(pid) for pid in parallel._engine.pids.values()]
        assert parallel.info.num_parameters == llm.info.num_parameters
        assert parallel.info.kv_bytes_per_token == llm.info.kv_bytes_per_token
        for params in (GREEDY, seeded, seeded):  # the third time, answers are drafted from the tree
            expected = [output.token_ids for output in llm.generate(prompts, params)]
            assert [output.token_ids for output in parallel.generate(prompts, params)] == expected
        assert sum(parallel.stats().accepted_draft_tokens.values()) > 0
        pattern = r"(\S+ ){3}\S+"
        seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=16)
        expected = [o.token_ids for o in llm.generate(prompts, seeded, regex=pattern)]
        held = [o.token_ids for o in parallel.generate(prompts, seeded, regex=pattern)]
        assert held == expected
        psutil.Process(parallel._engine.pids["worker"]).kill()
        with pytest.raises(EngineDiedError, match="worker process was killed by SIGKILL"):
            parallel.generate("a", SamplingParams(max_tokens=100, ignore_eos=True))
    assert not any(process.is_running() for process in family), "a closed one leaves none"


def test_numpy_token_ids_are_one_prompt(llm: LLM) -> None:
    ids = np.arange(5, 15)
    assert llm.generate(ids, GREEDY).token_ids == llm.generate(ids.tolist(), GREEDY).token_ids


@pytest.mark.parametrize(
    "prompt", [None, b"a", [1.5], {"prompt": "a"}, [None], [[1.5]], [2**40], [["a"]]]
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("messages", ["hi", [["hi"]], None, [{"role": "user"}]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate((p for p in ("a", "b")), GREEDY)) == 2  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_tokens", 4.5), ("top_k", 2.5), ("stop", [1]), ("stop_token_ids", [1.5]), ("ignore_eos", "x"), ("logit_bias", {"5": 1}), ("seed", 2**70)],
)  # fmt: skip
def test_a_setting_of_the_wrong_type_is_refused_by_name(
    llm: LLM, setting: str, value: object
) -> None:
    with pytest.raises(RequestError, match=setting):
        llm.generate("a", SamplingParams(**{setting: value}))


def test_one_stop_string_needs_no_tuple(llm: LLM) -> None:
    text = llm.generate("a", GREEDY).text
    stopped = llm.generate(
        "a", SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop=text[3:6])
    )
    assert stopped.text == text[: text.index(text[3:6])] and stopped.finish_reason == "stop"


def test_what_cannot_be_sent_is_refused(llm: LLM) -> None:
    deep: list = []
    for _ in range(900):
        deep = [deep]
    for content in (object(), 2**80, deep):
        with pytest.raises(RequestError):
            llm.chat([{"role": "user", "content": content}], GREEDY)


@pytest.mark.usefixtures("sigint")
def test_interrupted_generation_leaves_nothing_running(llm: LLM) -> None:
    def interrupt() -> None:
        while not llm.stats().running:
            time.sleep(0.002)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 20, SamplingParams(max_tokens=450, ignore_eos=True), progress=False)
    deadline = time.monotonic() + 10
    while llm.stats().running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert llm.stats(check_invariants=True).running == 0


def test_wrong_settings_say_what_to_change(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match="page_sise"):
        LLM(str(model_dir), page_sise=3)
    with pytest.raises(ConfigError, match="less than one page"):
        LLM(str(model_dir), max_total_tokens=1)
