"""Positions whose rotations are computed when they are first needed."""

from pathlib import Path

import torch
import transformers

from radixrt.base.sampling_params import SamplingParams
from radixrt.layers.rotary import FIRST_POSITIONS
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.in_process import InProcessEngine


def test_a_prompt_beyond_the_first_positions_is_answered_as_by_transformers(tmp_path: Path) -> None:
    make_checkpoint("llama_biased_tied", tmp_path, max_position_embeddings=4096)
    prompt = [3 + i * i % (VOCAB_SIZE - 3) for i in range(FIRST_POSITIONS + 7)]
    engine = InProcessEngine(tmp_path, max_total_tokens=8192)
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    answers = engine.generate([prompt[:9], prompt, prompt[: FIRST_POSITIONS - 2]], short)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for asked, answer in zip((9, len(prompt), FIRST_POSITIONS - 2), answers, strict=True):
        ids = torch.tensor([prompt[:asked]])
        expected = theirs.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert list(answer) == expected[0, asked:].tolist()
