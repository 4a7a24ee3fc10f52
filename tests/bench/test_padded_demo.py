"""The padded checkpoint: a larger shape with the built-in model's logits and answers."""

import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.padded_demo import PaddedShape, make_padded_demo
from radixrt.models.checkpoint import check_checkpoint

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "train_demo_model"))

import world  # noqa: E402

DEMO_MODEL = ROOT / "radixrt" / "demo_model"
SMALL = PaddedShape(1024, 7, 8, 4, 400)
QUESTIONS = 8
TASKS = ("qa", "second_turn", "json", "tool")


def test_logits_and_greedy_tokens_are_those_of_the_built_in_model(tmp_path: Path) -> None:
    folder = make_padded_demo(tmp_path / "padded", SMALL)
    check_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    small, padded = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (DEMO_MODEL, folder)
    )
    assert padded.config.hidden_size == 1024 and len(padded.model.layers) == 7
    for number in range(QUESTIONS):
        sample = world.sample(random.Random(number), TASKS[number % len(TASKS)], 1, "eval")
        pieces = [
            (tokenizer.encode(text, add_special_tokens=False), is_answer)
            for text, is_answer in world.render(sample.messages, sample.tools)
        ]
        ids = torch.tensor([[token for tokens, _ in pieces for token in tokens]])
        answers = torch.tensor([is_answer for tokens, is_answer in pieces for _ in tokens])
        with torch.inference_mode():
            expected, found = (model(ids).logits[0, :-1] for model in (small, padded))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
        assert answers.any()
        assert torch.equal(*(logits[answers[1:]].argmax(-1) for logits in (found, expected)))


def test_every_further_layer_and_head_has_its_weights(tmp_path: Path) -> None:
    """Layers that are zero altogether could be skipped by an engine."""
    weights = load_file(make_padded_demo(tmp_path, SMALL) / "model.safetensors")
    writes = {n for n in weights if not weights[n].any()}
    assert writes == {
        f"model.layers.{layer}.{part}.weight"
        for layer in (3, 6)
        for part in ("self_attn.o_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize(
    "shape", [PaddedShape(hidden_size=512), PaddedShape(intermediate_size=100), PaddedShape(num_key_value_heads=5)]
)  # fmt: skip
def test_shapes_that_would_not_be_exact_are_refused(shape: PaddedShape, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"built-in model"):
        make_padded_demo(tmp_path / "padded", shape)
    assert not (tmp_path / "padded").exists()
