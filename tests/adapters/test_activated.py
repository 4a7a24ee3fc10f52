"""An activated adapter works from its invocation on, as in peft, and the KV before is the base
model's."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.ids import unpack_ids
from radixrt.messages.steps import StepPlan
from radixrt.worker.drafts.price import Chance, Chances, DraftPrice
from tests.adapters.peft_adapters import ALL_LINEAR, make_adapter
from tests.checkpoints import make_checkpoint
from tests.checkpoints.draft_heads import Foresight, make_head
from tests.engine.in_process import InProcessEngine
from tests.engine.test_speculation import TORTURE

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason="adapters are computed by the native kernels"
)

INVOCATION = [377, 5, 378]
PAGE = 16
RANDOM = random.Random(11)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, logprobs=2, ignore_eos=True)


def some_tokens(count: int) -> list[int]:
    return [RANDOM.randrange(6, 370) for _ in range(count)]


CONVERSATION = some_tokens(1000)


class Models:
    """A checkpoint with two activated adapters and a plain one, and peft's models of them."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = make_checkpoint(
            "llama", folder / "base", initializer_range=0.06, max_position_embeddings=2048
        )
        self.theirs: dict[str, Any] = {}
        loras = []
        for seed, name in enumerate(("first", "second", "plain")):
            tokens = None if name == "plain" else INVOCATION
            config = peft.LoraConfig(
                task_type="CAUSAL_LM", alora_invocation_tokens=tokens, **ALL_LINEAR
            )
            loras.append(f"{name}={folder / name}")
            self.theirs[name] = make_adapter(
                self.checkpoint, folder / name, config, seed=seed, size=0.2
            )
        self.lora = " ".join(loras)

    def engine(self, **settings: object) -> InProcessEngine:
        defaults: dict[str, object] = {"lora": self.lora, "page_size": PAGE, "dtype": "float32"}
        return InProcessEngine(self.checkpoint, **{**defaults, **settings})

    def logprobs(self, name: str, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """peft's log-probabilities of an answer's tokens."""
        with torch.inference_mode():
            logits = self.theirs[name](input_ids=torch.tensor([prompt + answer])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return rows[torch.arange(len(answer)), torch.tensor(answer)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("activated"))


@pytest.fixture
def engine(models: Models) -> InProcessEngine:
    return models.engine()


Answer = tuple[list[int], list[bytes]]


def ask(engine: InProcessEngine, prompt: list[int], adapter: str, salt: str = "") -> Answer:
    tokens = engine.generate([prompt], GREEDY, salt, adapters=adapter)[0]
    return tokens, [np.array(row.logprobs).tobytes() for row in engine.logprobs[0]]


def check(
    models: Models, engine: InProcessEngine, prompt: list[int], name: str = "first"
) -> Answer:
    """The answer to a prompt, whose log-probabilities are peft's."""
    answer = ask(engine, prompt, name)
    ours = torch.tensor([row.logprobs[0] for row in engine.logprobs[0]])
    assert (ours - models.logprobs(name, prompt, answer[0])).abs().max() < 1e-4
    return answer


def test_a_cached_conversation_costs_nothing(models: Models, engine: InProcessEngine) -> None:
    ask(engine, CONVERSATION, "")
    prompt = [*CONVERSATION, *INVOCATION, *some_tokens(9)]
    answer = check(models, engine, prompt)
    assert engine.cached[0] >= 0.95 * len(prompt)
    assert answer != ask(engine, prompt, ""), "the adapter changes nothing"
    assert answer == ask(models.engine(), prompt, "first"), "a cold cache gives other bits"


@pytest.mark.parametrize("before", [0, 1, PAGE - 2, PAGE - 1, PAGE, 2 * PAGE - 1])
@pytest.mark.parametrize("chunk", [5, 512])
def test_invocations_around_a_page_border(models: Models, before: int, chunk: int) -> None:
    engine = models.engine(chunked_prefill_size=chunk)
    prompt = [*some_tokens(before), *INVOCATION, *some_tokens(30)]
    cold = check(models, engine, prompt)
    assert engine.cached == [0]
    assert check(models, engine, prompt) == cold
    assert engine.cached[0] == (len(prompt) - 1) // PAGE * PAGE
    ask(engine, prompt, "")
    assert engine.cached[0] == before // PAGE * PAGE, "the page of the border is the adapter's"


def test_the_last_of_two_invocations_counts(models: Models, engine: InProcessEngine) -> None:
    first = [*some_tokens(20), *INVOCATION, *some_tokens(20)]
    check(models, engine, first)
    twice = [*first, *INVOCATION, *some_tokens(20)]
    check(models, engine, twice)
    assert engine.cached == [16], "KV of the first invocation was used"


def test_without_an_invocation_it_is_the_base(models: Models, engine: InProcessEngine) -> None:
    prompt = some_tokens(50)
    base = ask(engine, prompt, "")
    assert check(models, engine, prompt) == base
    assert engine.cached == [48]
    assert ask(engine, INVOCATION[:2], "first") == ask(models.engine(), INVOCATION[:2], "")


def test_adapters_of_one_invocation_share_the_conversation_alone(
    models: Models, engine: InProcessEngine
) -> None:
    prompt = [*CONVERSATION[:64], *INVOCATION, *some_tokens(40)]
    answers = {
        name: ask(models.engine(), prompt, name) for name in ("first", "second", "plain", "")
    }
    assert len({str(answer) for answer in answers.values()}) == 4
    assert ask(engine, prompt, "first") == answers["first"] and engine.cached == [0]
    assert ask(engine, prompt, "second") == answers["second"] and engine.cached == [64]
    assert ask(engine, prompt, "") == answers[""] and engine.cached == [64]
    assert ask(engine, prompt, "plain") == answers["plain"] and engine.cached == [0]
    assert ask(engine, prompt, "first", salt="s") == answers["first"] and engine.cached == [0]
    names = ["first", "", "second", "plain", "first"]
    together = engine.generate([prompt] * 5, GREEDY, "new", adapters=names)
    assert together == [answers[name][0] for name in names]


def draft_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps take on this machine."""
    monkeypatch.setattr(DraftPrice, "next", lambda self, rows: 0.0)
    monkeypatch.setattr(Chances, "estimate", lambda self, source: Chance(0.9, 0.9))


def test_drafts_from_the_tree_are_tokens(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of the tree are not those of the vocabulary behind an invocation."""
    draft_at_every_step(monkeypatch)
    engine = models.engine(speculation="auto")
    prompt = [*CONVERSATION[:40], *INVOCATION, *some_tokens(20)]
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (expected,) = models.engine().generate([prompt], long, adapters="first")
    assert engine.generate([prompt], long, adapters="first") == [expected]
    counters, admitted = engine.scheduler.state.counters, list[StepPlan]()
    assert not counters.drafted_tokens["tree"]
    step = engine.runner.step
    monkeypatch.setattr(engine.runner, "step", lambda plan: admitted.append(plan) or step(plan))
    assert engine.generate([prompt], long, adapters="first") == [expected]
    (admit,) = (admit for plan in admitted for admit in plan.admit)
    assert admit.drafts is not None
    assert unpack_ids(admit.drafts.continuation).tolist() == expected
    drafted, accepted = counters.drafted_tokens["tree"], counters.accepted_draft_tokens["tree"]
    assert drafted == accepted > 40


def test_a_reload_keeps_digests_apart(models: Models, engine: InProcessEngine) -> None:
    prompt = [*INVOCATION, *some_tokens(40)]
    old = ask(engine, prompt, "first")
    folder = next(Path(one[7:]) for one in models.lora.split() if one.startswith("second="))
    info = engine.load_adapter("first", folder)
    assert isinstance(info, AdapterInfo) and info.invocation == tuple(INVOCATION)
    new = ask(engine, prompt, "first")
    assert engine.cached == [0] and new != old
    assert ask(engine, prompt, "second") == new and engine.cached == [32]


def test_a_draft_head_changes_no_answer_of_an_adapter(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head reads the states that the adapter has changed, also behind a cached prefix."""
    draft_at_every_step(monkeypatch)
    monkeypatch.setattr(DraftPrice, "of_head", lambda self, rows: 0.0)
    head = make_head(tmp_path, json.loads((models.checkpoint / "config.json").read_text()))
    engine = models.engine(speculation="head", draft_model=str(head))
    plain, foresight = models.engine(), Foresight(monkeypatch)
    names = ["first", "", "plain", "second"]
    sampled = msgspec.structs.replace(GREEDY, temperature=1.0, seed=5)
    for number in range(25 if TORTURE else 1):
        prompts = [[*CONVERSATION[:40], *INVOCATION, *some_tokens(9)] for _ in names]
        sampling = [sampled if (number + place) % 2 else GREEDY for place in range(4)]
        expected = plain.generate(prompts, sampling, adapters=names)
        foresight.texts = [p + answer for p, answer in zip(prompts, expected, strict=True)]
        for _ in range(2):
            assert engine.generate(prompts, sampling, adapters=names) == expected
            assert engine.logprobs == plain.logprobs  # bit for bit
    counters = engine.scheduler.state.counters
    assert 20 < counters.accepted_draft_tokens["head"] < counters.drafted_tokens["head"]
