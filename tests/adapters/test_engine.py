"""An answer depends on its request and its adapter alone, whatever else is in the batch, and no KV
is shared by two adapters."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.calls import UnloadAdapterCall
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from tests.adapters.operations import Operations
from tests.adapters.peft_adapters import config_of, make_adapter
from tests.engine.in_process import GREEDY, InProcessEngine

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason="adapters are computed by the native kernels"
)

CYCLES = int(os.environ.get("RADIXRT_ADAPTERS", "20"))
KINDS = ["all_linear", "q_and_v", "rslora", "patterns"]
NAMES = [f"adapter{number}" for number in range(8)]
EVERY = ["", *NAMES]
RANDOM = random.Random(3)
PROMPTS = [[RANDOM.randrange(3, 380) for _ in range(n)] for n in (5, 40, 17, 33, 21, 3, 64, 9, 28)]
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Eight adapters of a checkpoint by name, of several kinds."""
    made = {}
    for number, name in enumerate(NAMES):
        made[name] = tmp_path_factory.mktemp(name)
        config = config_of(KINDS[number % len(KINDS)], "qwen3")
        make_adapter(checkpoint("qwen3"), made[name], config, seed=number, size=0.5)
    return made


@pytest.fixture
def make_engine(
    checkpoint: Callable[[str], Path], folders: dict[str, Path]
) -> Callable[..., InProcessEngine]:
    lora = " ".join(f"{name}={folder}" for name, folder in folders.items())

    def make(**settings: object) -> InProcessEngine:
        return InProcessEngine(checkpoint("qwen3"), **{"lora": lora, **settings})

    return make


Answers = list[tuple[tuple[int, ...], bytes]]


def answers(
    engine: InProcessEngine, prompts: list[list[int]], names: list[str], salt: str
) -> Answers:
    """Tokens and log-probabilities of prompts that arrive together."""
    tokens = engine.generate(prompts, SAMPLED, salt, adapters=names)
    rows = [
        b"".join(row.token_ids + np.array(row.logprobs).tobytes() for row in logprobs)
        for logprobs in engine.logprobs
    ]
    return [(tuple(ids), own) for ids, own in zip(tokens, rows, strict=True)]


SETTINGS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16", "chunked_prefill_size": 7},
    {"dtype": "bfloat16", "quantization": "int8", "page_size": 4},
    {"dtype": "float16", "quantization": "int4", "deterministic": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_eight_adapters_and_the_base_in_a_batch_answer_as_each_alone(
    make_engine: Callable[..., InProcessEngine], settings: dict[str, object]
) -> None:
    engine = make_engine(**settings)
    alone = [
        answers(engine, [prompt], [name], "alone")[0]
        for prompt, name in zip(PROMPTS, EVERY, strict=True)
    ]
    assert answers(engine, PROMPTS, EVERY, "together") == alone
    order = list(range(9))
    RANDOM.shuffle(order)
    shuffled = answers(engine, [PROMPTS[i] for i in order], [EVERY[i] for i in order], "shuffled")
    assert shuffled == [alone[i] for i in order]
    warm = answers(engine, PROMPTS, EVERY, "together")
    assert warm == alone and any(engine.cached), "the cache was not hit"
    one = answers(engine, [PROMPTS[1]] * 9, EVERY, "one prompt")
    assert len(set(one)) == 9, "two adapters answer alike"


def test_the_base_answers_as_without_adapters(
    make_engine: Callable[..., InProcessEngine],
) -> None:
    plain = answers(make_engine(lora=None), PROMPTS, [""] * 9, "")
    assert answers(make_engine(), PROMPTS, [""] * 9, "") == plain


def test_an_adapter_changes_most_greedy_answers(
    make_engine: Callable[..., InProcessEngine],
) -> None:
    engine = make_engine()
    prompts = [[RANDOM.randrange(3, 380) for _ in range(30)] for _ in range(30)]
    base = engine.generate(prompts, SHORT)
    for name in NAMES[:2]:
        changed = engine.generate(prompts, SHORT, adapters=name)
        assert sum(a != b for a, b in zip(base, changed, strict=True)) >= 27


def test_no_kv_is_shared_across_adapters_names_and_digests(
    make_engine: Callable[..., InProcessEngine],
) -> None:
    engine, prompt = make_engine(page_size=4), PROMPTS[6]
    engine.generate([prompt], SHORT, adapters=NAMES[0])
    assert engine.cached == [0]
    engine.generate([prompt], SHORT, adapters=NAMES[0])
    assert engine.cached == [60]
    first = engine.scheduler.adapters.infos[0]
    for salt in ("", first.name, first.digest, CacheRoot(adapter=first.digest).packed().decode()):
        engine.generate([prompt], SHORT, salt)
        assert engine.cached == [0], salt
        engine.generate([prompt], SHORT, salt, adapters=NAMES[1])
        assert engine.cached == [0], salt


def test_a_reload_under_one_name_under_streams(
    make_engine: Callable[..., InProcessEngine], folders: dict[str, Path]
) -> None:
    """Each of 16 streams answers as one of the two adapters, that of its arrival."""
    engine = make_engine(max_loras=9, disable_radix_cache=False, page_size=4)
    prompts = [[*PROMPTS[6], number] for number in range(3, 19)]
    old = engine.generate(prompts, adapters=NAMES[0], salt="old")
    new = engine.generate(prompts, adapters=NAMES[1], salt="new")
    seq_ids = engine.begin(prompts, adapters=NAMES[0])
    outputs: dict[int, list[int]] = {seq_id: [] for seq_id in seq_ids}

    def absorb(steps: int) -> None:
        for _ in range(steps):
            for batch in engine.advance():
                for seq_id, output in batch.outputs.items():
                    outputs.setdefault(seq_id, []).extend(output.token_ids)

    absorb(10)
    info = engine.load_adapter(NAMES[0], folders[NAMES[1]])
    assert isinstance(info, AdapterInfo) and info.place == 1, "the same bytes have one place"
    late = engine.begin(prompts, adapters=NAMES[0])
    absorb(400)
    assert [outputs[seq_id] for seq_id in seq_ids] == old
    assert [outputs[seq_id] for seq_id in late] == new
    assert 0 not in engine.scheduler.adapters.users, "the old adapter has left its place"


def test_loads_and_unloads(
    make_engine: Callable[..., InProcessEngine], folders: dict[str, Path]
) -> None:
    engine = make_engine(lora=f"{NAMES[0]}={folders[NAMES[0]]}", max_loras=2)
    expected = {name: None for name in NAMES}
    for number in range(CYCLES):
        name = NAMES[number % 8]
        info = engine.load_adapter("hot", folders[name])
        assert isinstance(info, AdapterInfo), info
        answer = engine.generate([PROMPTS[0]] * 2, SHORT, adapters=["hot", NAMES[0]])
        assert expected[name] in (None, answer)
        expected[name] = answer
        assert engine.cached[0] <= (0 if number < 8 else 4)
        engine.scheduler.adapters.unload(UnloadAdapterCall(name="hot"))
        assert len(engine.scheduler.adapters.users) == 1
    assert len({str(answer) for answer in expected.values()}) == 8


def test_a_load_computes_nothing_on_the_thread_of_the_steps(
    make_engine: Callable[..., InProcessEngine], folders: dict[str, Path]
) -> None:
    """Also where layers get adapters that had none. All answers would wait for it."""
    expected = make_engine().generate(PROMPTS, SHORT, adapters=NAMES[0])
    engine = make_engine(lora=f"{NAMES[1]}={folders[NAMES[1]]}")
    base, few = (engine.generate(PROMPTS, SHORT, adapters=name) for name in ("", NAMES[1]))
    with Operations() as operations:
        assert isinstance(engine.load_adapter("hot", folders[NAMES[0]]), AdapterInfo)
        assert not operations.names
        assert torch.zeros(1) is not None and operations.names, "nothing is counted"
    assert engine.generate(PROMPTS, SHORT, "new", adapters="hot") == expected
    assert engine.generate(PROMPTS, SHORT, "new", adapters=NAMES[1]) == few
    assert engine.generate(PROMPTS, SHORT, "new") == base


def test_an_adapter_of_a_larger_rank_changes_no_bit_of_others(
    make_engine: Callable[..., InProcessEngine], folders: dict[str, Path]
) -> None:
    """Stacks grow with the largest rank of a projection: 8, then 20."""
    engine = make_engine(lora=f"{NAMES[0]}={folders[NAMES[0]]}", dtype="bfloat16")
    few = answers(engine, PROMPTS[:2], [NAMES[0]] * 2, "before")
    with Operations() as operations:
        assert isinstance(engine.load_adapter("larger", folders[NAMES[3]]), AdapterInfo)
    assert not operations.names
    assert answers(engine, PROMPTS[:2], [NAMES[0]] * 2, "after") == few
    names = ["larger", NAMES[0]]
    other = make_engine(lora=f"{NAMES[0]}={folders[NAMES[3]]}", dtype="bfloat16")
    larger = answers(other, PROMPTS[:1], [NAMES[0]], "")
    assert answers(engine, PROMPTS[:2], names, "together") == [*larger, few[1]]


def test_an_adapter_that_is_gone_is_named(make_engine: Callable[..., InProcessEngine]) -> None:
    engine = make_engine()
    info = engine.scheduler.adapters.unload(UnloadAdapterCall(name=NAMES[0]))
    root = CacheRoot(adapter=info.digest)
    options = RequestOptions(sampling=GREEDY, root=root, adapter_name=NAMES[0])
    request = SequenceRequest(seq_id=1, token_ids=pack_ids([1, 2, 3]), options=options)
    refused = engine.scheduler.add(request)
    assert refused is not None and refused.status == 503 and NAMES[0] in refused.message
    unnamed = engine.scheduler.add(replace(request, options=replace(options, adapter_name="")))
    assert unnamed is not None and info.digest in unnamed.message
    torch.set_num_threads(1)
