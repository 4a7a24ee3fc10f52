"""The oracle: every architecture gives the logits and the greedy tokens that transformers gives;
``test_hybrids`` has those with recurrent layers.

``make test`` takes the whole prompt and one other chunk for each architecture, in turn, and leaves
the greedy tokens of those that ``tests/engine`` asks for to it; ``make determinism`` takes all.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers

from radixrt.attention.backend import AttentionSetup
from radixrt.attention.registry import make_backend
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from tests.checkpoints import CONFIGS, HYBRIDS, VOCAB_SIZE
from tests.engine.test_against_transformers import ELSEWHERE
from tests.models.harness import Harness, Sequence

TOLERANCE = 1e-4
IN_FULL = "RADIXRT_DETERMINISM" in os.environ
ARCHITECTURES = sorted(CONFIGS.keys() - HYBRIDS, key=lambda name: (name not in ELSEWHERE, name))
GREEDY_HERE = ARCHITECTURES if IN_FULL else [name for name in ARCHITECTURES if name in ELSEWHERE]
"""They are the first, so that pytest makes each pair once."""
CHUNKS_AND_PAGES = [(None, 16), (1, 1), (7, 16), (64, 1)]
torch.set_num_threads(1)


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


PROMPT = random_tokens(75, seed=1)
PROMPTS = [random_tokens(n, seed=n) for n in (17, 40, 75, 33)]


@dataclass
class Pair:
    """A checkpoint, loaded by us and by transformers."""

    name: str
    ours: CausalLM
    theirs: transformers.PreTrainedModel
    logits: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def expected_logits(self, tokens: list[int]) -> torch.Tensor:
        if (key := tuple(tokens)) not in self.logits:
            self.logits[key] = self.theirs(torch.tensor([tokens])).logits[0]
        return self.logits[key]

    def is_greedy(self, prompt: list[int], answer: list[int]) -> bool:
        """Whether each token is the most likely one behind those before it, by one forward pass of
        transformers, whose ``generate`` would take one for each."""
        if self.name == "phi3_long":  # whose factors depend on the length of the whole text
            return answer == self.generated(prompt, len(answer))
        logits = self.expected_logits(prompt + answer[:-1])[len(prompt) - 1 :]
        return answer == logits.argmax(-1).tolist()

    def generated(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = self.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=count, do_sample=False, pad_token_id=0
            ),
        )
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Pair:
    folder = checkpoint(request.param)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    theirs.generation_config.eos_token_id = None
    return Pair(request.param, load_model(folder), theirs)


def test_prompt_logits_equal_transformers_whatever_the_chunks_and_pages(pair: Pair) -> None:
    whole, *chunked = CHUNKS_AND_PAGES
    if not IN_FULL:
        chunked = [chunked[ARCHITECTURES.index(pair.name) % len(chunked)]]
    for chunk, page_size in (whole, *chunked):
        logits = Harness(pair.ours, page_size).logits(PROMPT, chunk)
        torch.testing.assert_close(
            logits, pair.expected_logits(PROMPT), atol=TOLERANCE, rtol=0, check_stride=False
        )


@pytest.mark.parametrize(("page_size", "backend"), [(16, "auto"), (1, "torch_reference")])
def test_a_step_that_mixes_prefill_chunks_and_decodes_equals_transformers(
    pair: Pair, page_size: int, backend: str
) -> None:
    harness = Harness(pair.ours, page_size, backend=make_backend(backend, AttentionSetup()))
    decoding, extending, starting, single = (Sequence() for _ in PROMPTS)
    a, b, c, d = PROMPTS
    harness.step([(decoding, a[:-2]), (extending, b[:13]), (single, d[:-1])])
    harness.step([(extending, b[13:20]), (decoding, a[-2:-1])])
    mixed = harness.step([(decoding, a[-1:]), (extending, b[20:]), (starting, c), (single, d[-1:])])
    for logits, prompt in zip(mixed, PROMPTS, strict=True):
        expected = pair.expected_logits(prompt)[-len(logits) :]
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pair", GREEDY_HERE, indirect=True)
def test_64_greedy_tokens_of_a_mixed_batch_equal_transformers(pair: Pair) -> None:
    generated = Harness(pair.ours, page_size=16).generate(PROMPTS, 64)
    for tokens, prompt in zip(generated, PROMPTS, strict=True):
        assert len(tokens) == 64 and pair.is_greedy(prompt, tokens)
