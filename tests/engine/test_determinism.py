"""An answer depends on its request alone: tokens and log-probabilities have the same bits whatever
the cache, the chunks, the batch, the threads and the adapters of others are.

``make test`` takes 12 prompts and three families without adapters, which take turns at the sizes of
chunks and the numbers of threads. With ``RADIXRT_DETERMINISM=60`` (``make
determinism``) it is 60 documents with five prompts each, and every family, in every dtype, in int8
and int4, and with a KV cache in int8.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest

import radixrt_kernels
from radixrt.attention.cpu import CpuBackend
from radixrt.attention.metadata import AttentionMetadata
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import unpack_ids
from radixrt.messages.sequences import PositionLogprobs
from radixrt.models import head_files
from radixrt.scheduler.queue.admission import Admission
from radixrt.worker.drafts.price import Chance, Chances, DraftPrice
from radixrt.worker.threads import use_threads
from radixrt_kernels import attention
from tests.adapters.peft_adapters import make_adapter
from tests.checkpoints import CONFIGS, HYBRIDS, make_checkpoint
from tests.checkpoints.draft_heads import make_head
from tests.checkpoints.mtp_checkpoints import make_with_mtp
from tests.engine.in_process import InProcessEngine
from tests.scheduler.engine_model import expect_nothing

THOROUGH = "RADIXRT_DETERMINISM" in os.environ
DOCUMENTS, QUESTIONS = int(os.environ.get("RADIXRT_DETERMINISM", "4")), 5 if THOROUGH else 3
ANSWER_TOKENS = 8
CONTEXT = 1024
POOL_TOKENS = 32768
"""Room for the pages of all prompts."""
ADAPTERS = ("plain", "activated")
INVOCATION = [377, 5, 378]
STATES_A_PROMPT = 8
"""That a hybrid model keeps, with those of its answer: its pool is as many times larger, so that
none is dropped."""

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason="PyTorch's kernels promise nothing of this kind"
)


class Case(NamedTuple):
    """A model and its settings."""

    family: str
    dtype: str
    quantization: str = "auto"
    kv_cache: str = "auto"
    heads: str = "auto"
    """Heads of queries, x, heads of keys and values."""
    drafts: str = "auto"
    """``head``, ``mtp``: a draft head, or layer, of random weights drafts in each step."""
    adapters: str = "auto"
    """``lora``: two of three requests have an adapter, of which one is activated."""

    @property
    def overrides(self) -> dict[str, int]:
        """Fields of the config."""
        if self.heads == "auto":
            return {}
        names = ("num_attention_heads", "num_key_value_heads")
        return dict(zip(names, map(int, self.heads.split("x")), strict=True))

    def __str__(self) -> str:
        return "-".join(part for part in self if part != "auto")


CASES = [Case("gemma2", "float32"), Case("qwen3_moe", "bfloat16"), Case("qwen3_5", "bfloat16")]
if THOROUGH:
    others = CONFIGS.keys() - {"qwen3_moe", "qwen3_5", "mamba2"}  # the last has no attention
    CASES += [Case(family, "bfloat16") for family in sorted(others)]
    CASES += [Case("qwen3_moe", "float32"), Case("llama", "float32"), Case("qwen3", "float16")]
    CASES += [
        Case(family, "bfloat16", quantization)
        for family in ("llama_biased_tied", "gemma3", "qwen3_moe")
        for quantization in ("int8", "int4")
    ]
    CASES += [Case("qwen3", "bfloat16", "auto", "int8"), Case("gemma3", "float32", "int4", "int8")]
    CASES += [Case("gemma4_e", "float32", "int8", "int8"), Case("gemma4_moe", "bfloat16", "int4")]
    CASES += [Case("gpt_oss", "float32", "int4", "int8")]
    CASES += [
        Case("deepseek_v3", "bfloat16", "int8", "int8"),
        Case("glm4_moe_lite", "float32", "auto", "int8"),
    ]
    CASES += [Case(family, "bfloat16", "auto", "int8", "8x1") for family in ("qwen2", "gemma2")]
    CASES += [
        Case("llama", "bfloat16", drafts="head"),
        Case("qwen3_moe", "float32", "int8", drafts="head"),
        Case("gemma3", "bfloat16", "auto", "int8", drafts="head"),
        Case("deepseek_v3", "float32", drafts="mtp"),
        Case("glm4_moe", "bfloat16", "int8", drafts="mtp"),
        Case("qwen3_5", "bfloat16", "auto", "int8", drafts="mtp"),
    ]
    CASES += [
        Case(family, dtype, *quantization, adapters="lora")
        for family, dtype, *quantization in (
            ("llama", "bfloat16"),
            ("qwen3_moe", "bfloat16", "int8"),
            ("gemma3", "bfloat16", "int4", "int8"),
            ("deepseek_v3", "float32"),
            ("qwen3_5", "bfloat16"),
            ("gpt_oss", "float32", "int4", "int8"),
        )
    ]
    CASES += [Case("llama", "bfloat16", drafts="head", adapters="lora")]


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: SamplingParams
    adapter: str
    """Where the case has adapters."""


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: bytes
    """Of each token and of the likeliest, with their ids."""


def make_requests() -> list[Request]:
    """Several questions on each document; some documents are longer than the longest chunk. Half of
    the answers are greedy, half are sampled at temperature 1."""
    rng = random.Random(0)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(3, 380) for _ in range(rng.randint(low, high))]

    requests = []
    for index in range(DOCUMENTS):
        document = tokens(560, 700) if index % 4 == 3 else tokens(257, 330)
        for _ in range(QUESTIONS):
            seed = len(requests)
            sampling = SamplingParams(
                temperature=float(seed % 2),
                frequency_penalty=0.5 if seed % 5 == 4 else 0.0,
                seed=seed,
                max_tokens=ANSWER_TOKENS,
                ignore_eos=True,
                logprobs=3,
            )
            adapter = ("", *ADAPTERS)[seed % 3]
            begin = INVOCATION if adapter == "activated" else []
            requests.append(Request(document + begin + tokens(1, 40), sampling, adapter))
    return requests


REQUESTS = make_requests()


@dataclass
class Steps:
    """The largest step that the backend has planned."""

    sequences: int = 0
    queries: int = 0
    """Of one sequence."""
    shared_tokens: int = 0
    """Of one group of sequences."""
    cached: list[int] = field(default_factory=list)
    """Tokens of each prompt that came from the cache."""
    retractions: int = 0
    drafted: int = 0
    """Tokens of the last engine."""

    def see(self, metadata: AttentionMetadata) -> None:
        if metadata.page_size == 1:
            return  # that of a draft head
        queries = np.diff(metadata.qo_indptr_cpu.numpy())
        self.sequences = max(self.sequences, len(queries))
        self.queries = max(self.queries, int(queries.max()))
        if (groups := metadata.shared_prefixes) is not None:
            shared = int(groups.num_pages.max()) * metadata.page_size
            self.shared_tokens = max(self.shared_tokens, shared)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What the engines of this test do."""
    seen, plan = Steps(), CpuBackend.plan

    def watched(backend: CpuBackend, metadata: AttentionMetadata) -> None:
        seen.see(metadata)
        plan(backend, metadata)

    monkeypatch.setattr(CpuBackend, "plan", watched)
    return seen


@dataclass(frozen=True)
class Model:
    """The checkpoint of a case, and what is expected of it."""

    folder: Path
    case: Case
    expected: list[Answer] = field(default_factory=list)

    def engine(self, *, threads: int = 1, **settings: Any) -> InProcessEngine:
        tokens = POOL_TOKENS * (STATES_A_PROMPT if self.case.family in HYBRIDS else 1)
        usual = {"max_total_tokens": tokens, "max_prefill_tokens": 2 * CONTEXT, "max_step_ms": 0}
        return InProcessEngine(
            self.folder,
            dtype=self.case.dtype,
            quantization=self.case.quantization,
            kv_cache_dtype=self.case.kv_cache,
            kernel_threads=threads,
            context_length=CONTEXT,
            speculation="off" if self.case.drafts == "auto" else "head",
            lora=None if self.case.adapters == "auto" else lora_setting(self.folder),
            **{**usual, **settings},
        )


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    before = radixrt_kernels.native.num_threads()
    yield
    use_threads(1)
    radixrt_kernels.native.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.family)
    make = make_with_mtp if case.drafts == "mtp" else make_checkpoint
    make(case.family, folder, max_position_embeddings=CONTEXT, **case.overrides)
    if case.adapters == "lora":
        make_adapters(folder)
    model = Model(folder, case._replace(drafts="auto"))
    engine = model.engine()
    cold = answers(engine, Steps(), batch=1)
    if case.adapters == "lora":
        prompt = REQUESTS[0].prompt + INVOCATION
        one = {str(engine.generate([prompt], adapters=name)) for name in ("", *ADAPTERS)}
        assert len(one) == 3, "two adapters answer alike"
    assert len({answer.token_ids for answer in cold}) > len(cold) / 2, "the model repeats itself"
    with pytest.MonkeyPatch.context() as patched:
        if case.drafts == "head":
            make_head(folder / head_files.FOLDER, json.loads((folder / "config.json").read_text()))
        if case.drafts != "auto":
            patched.setattr(head_files, "FREQUENT_IDS", 128)
            patched.setattr(DraftPrice, "next", lambda self, rows: 0.0)
            patched.setattr(DraftPrice, "of_head", lambda self, rows: 0.0)
            patched.setattr(Chances, "estimate", lambda self, source: Chance(0.9, 0.9))
        yield Model(folder, case, cold)


def make_adapters(folder: Path) -> None:
    """Save a plain adapter of everything that the model has, and an activated one."""
    make_adapter(folder, folder / "plain", None, size=0.4)
    activated = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=r".*_attn\.(q_proj|q_b_proj|v_proj|o_proj|in_proj_qkv)",
        alora_invocation_tokens=INVOCATION,
        r=5,
    )
    make_adapter(folder, folder / "activated", activated, seed=1, size=0.4)


def lora_setting(folder: Path) -> str:
    return " ".join(f"{name}={folder / name}" for name in ADAPTERS)


def adapters_of(engine: InProcessEngine, requests: list[Request]) -> list[str]:
    has_adapters = bool(engine.scheduler.adapters.infos)
    return [request.adapter if has_adapters else "" for request in requests]


def answers(
    engine: InProcessEngine,
    steps: Steps,
    *,
    batch: int,
    salt: str | None = None,
    requests: list[Request] = REQUESTS,
) -> list[Answer]:
    """The answer to each request, ``batch`` at a time.

    Args:
        salt: of all prompts; None: each has its own, so that no prompt finds another's cache.
    """
    steps.cached = []
    done: list[Answer] = []
    for first in range(0, len(requests), batch):
        some = requests[first : first + batch]
        salts = [f"prompt {first + i}" if salt is None else salt for i in range(len(some))]
        prompts, sampling = [one.prompt for one in some], [one.sampling for one in some]
        names = adapters_of(engine, some)
        tokens = engine.generate(prompts, sampling, salts, adapters=names)
        steps.cached += engine.cached
        done += [
            Answer(tuple(ids), as_bytes(rows))
            for ids, rows in zip(tokens, engine.logprobs, strict=True)
        ]
    counters = engine.scheduler.state.counters
    steps.retractions, steps.drafted = counters.retractions, sum(counters.drafted_tokens.values())
    return done


def as_bytes(rows: list[PositionLogprobs]) -> bytes:
    assert len(rows) == ANSWER_TOKENS
    return b"".join(row.token_ids + np.array(row.logprobs).tobytes() for row in rows)


# ------------------------------------------------------------ the same answers


def test_a_cold_prompt_twice(model: Model, steps: Steps) -> None:
    assert answers(model.engine(page_size=4), steps, batch=1) == model.expected
    assert not any(steps.cached) and steps.sequences == 1
    assert (steps.drafted > ANSWER_TOKENS * len(REQUESTS) / 2) == (model.case.drafts != "auto")


def test_a_cache_hit(model: Model, steps: Steps) -> None:
    engine = model.engine()
    answers(engine, steps, batch=1, salt="")
    assert answers(engine, steps, batch=1, salt="") == model.expected
    assert min(steps.cached) >= 256


def of_the(model: Model, values: tuple[int, ...]) -> tuple[int, ...]:
    """The values that are tried with a model: in ``make test`` one, in turn."""
    return values if THOROUGH else (values[CASES.index(model.case) % len(values)],)


def test_chunks(model: Model, steps: Steps) -> None:
    for chunk in of_the(model, (64, 512)):
        engine = model.engine(chunked_prefill_size=chunk)
        assert answers(engine, steps, batch=1) == model.expected
        assert not any(steps.cached) and steps.queries == chunk


def test_a_batch(model: Model, steps: Steps) -> None:
    for threads in of_the(model, (1, 2)):
        engine = model.engine(threads=threads, chunked_prefill_size=200)
        assert answers(engine, steps, batch=16) == model.expected
        assert not any(steps.cached) and not steps.shared_tokens
        assert steps.sequences == min(16, len(REQUESTS))


def test_a_batch_that_shares_prefixes(model: Model, steps: Steps) -> None:
    for threads in of_the(model, (2, 1)):
        engine = model.engine(threads=threads)
        answers(engine, steps, batch=1, salt="")
        assert answers(engine, steps, batch=16, salt="") == model.expected
        assert min(steps.cached) >= 256 and steps.shared_tokens >= attention.KEYS_PER_CUT


def test_two_threads(model: Model, steps: Steps) -> None:
    assert answers(model.engine(threads=2), steps, batch=1) == model.expected


def test_retractions(model: Model, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_forecast", expect_nothing)  # so that pages run out
    retractions = 0
    for first in range(0, len(REQUESTS), 16):
        requests = REQUESTS[first : first + 16]
        room = sum(len(request.prompt) + 4 for request in requests)
        engine = model.engine(page_size=4, max_total_tokens=room)
        given = answers(engine, steps, batch=16, requests=requests)
        assert given == model.expected[first : first + 16]
        retractions += steps.retractions
    if model.case.drafts == "auto":  # else positions held for drafts leave none to retract
        assert retractions >= len(REQUESTS) / 20


def test_an_engine_that_takes_over(model: Model) -> None:
    """It gets the prompt and the tokens that were delivered."""
    engine = model.engine()
    for request, answer in zip(REQUESTS[:20], model.expected, strict=False):
        begun = list(answer.token_ids[:5])
        (name,) = adapters_of(engine, [request])
        rest = engine.generate_from(request.prompt, begun, request.sampling, adapter=name)
        assert tuple(begun + rest) == answer.token_ids
        assert answer.logprobs.endswith(
            b"".join(row.token_ids + np.array(row.logprobs).tobytes() for row in engine.logprobs[0])
        )


def test_log_probabilities_of_prompts(model: Model) -> None:
    requests = REQUESTS[:3]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=2, seed=0, ignore_eos=True)
    alone, together = model.engine(), model.engine(threads=2, chunked_prefill_size=100)
    expected = [one for request in requests for one in scores(alone, [request], sampling)]
    assert scores(together, requests, sampling) == expected


def scores(
    engine: InProcessEngine, requests: list[Request], sampling: SamplingParams
) -> list[list[tuple[list[int], list[float]]]]:
    prompts = [request.prompt for request in requests]
    engine.generate(prompts, sampling, adapters=adapters_of(engine, requests))
    return [
        [(unpack_ids(row.token_ids).tolist(), row.logprobs) for row in rows]
        for rows in engine.prompt_logprobs
    ]


# ------------------------------------------------------------ and other ones


def test_cuts_that_depend_on_the_load_are_found(
    model: Model, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This file sees them: they change the bits of log-probabilities."""
    if model.case.family in ("mistral", "mixtral"):
        pytest.skip("all windows of the model are shorter than a cut")
    plan: Callable[..., None] = CpuBackend.plan

    def by_load(backend: CpuBackend, metadata: AttentionMetadata) -> None:
        busy = len(metadata.qo_indptr_cpu) - 1 > 8
        with monkeypatch.context() as cut:
            cut.setattr(attention, "KEYS_PER_CUT", 128 if busy else 256)
            plan(backend, metadata)

    monkeypatch.setattr(CpuBackend, "plan", by_load)
    assert answers(model.engine(), steps, batch=1) == model.expected
    assert answers(model.engine(), steps, batch=16) != model.expected
