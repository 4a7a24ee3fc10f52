"""The oracle on a GPU: every architecture in bfloat16, through the whole worker, beside
transformers in float32.

Two computations in bfloat16 differ, so each is held against float32: ours may be off by no more
than twice what transformers' own bfloat16 is off, and every greedy token has to be the reference's
best but for that.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import make_device
from tests.checkpoints import CONFIGS, HYBRIDS, VOCAB_SIZE, make_checkpoint
from tests.engine.in_process import InProcessEngine

LIKE_SERVED = {
    "head_dim": 128,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
}
"""Heads as FlashInfer has kernels for."""

LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""Sizes of latents as FlashInfer has a kernel for."""

OWN_SHAPE = (
    "phi3",
    "phi3_long",
    "gemma3_vision",
    "gemma4",
    "gemma4_moe",
    "gemma4_e",
    "qwen2",
    "qwen2_yarn",
)
"""Their heads follow from other settings; they are served by the reference's attention."""

ANSWER = 24
SCORED = SamplingParams(
    temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0, prompt_logprobs=0
)
PROMPTS = [
    [random.Random(n).randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (5, 40, 100, 17, 64)
]


def reference_logprobs(
    folder: Path, tokens: list[list[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Log-probabilities [len(tokens) - 1, vocab] of what follows each token, by transformers on the
    GPU."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype
    )
    model = model.eval().cuda()
    with torch.inference_mode():
        return [
            model(torch.tensor([ids[:-1]], device="cuda")).logits[0].float().log_softmax(-1).cpu()
            for ids in tokens
        ]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name not in HYBRIDS])
def test_logprobs_and_greedy_tokens(architecture: str, graphs: bool, tmp_path: Path) -> None:
    overrides = {} if architecture in OWN_SHAPE else LIKE_SERVED
    if architecture in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        overrides = {**overrides, **LATENTS}
    elif "moe" in architecture and not graphs:
        overrides = {}  # one of the two with the reference's attention
    folder = make_checkpoint(architecture, tmp_path, **overrides)
    engine = InProcessEngine(
        folder,
        device=make_device(torch.device("cuda")),
        dtype="bfloat16",
        debug_disable_cuda_graph=not graphs,
    )
    answers = engine.generate(PROMPTS, SCORED)
    whole = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    exact = reference_logprobs(folder, whole, torch.float32)
    halves = reference_logprobs(folder, whole, torch.bfloat16)
    ours = [
        torch.tensor([row.logprobs[0] for row in rows])
        for rows in (
            [*prompt, *answer]
            for prompt, answer in zip(engine.prompt_logprobs, engine.logprobs, strict=True)
        )
    ]
    allowed = 2 * max(
        (chosen(half, ids) - chosen(full, ids)).abs().max()
        for half, full, ids in zip(halves, exact, whole, strict=True)
    ) + np.float32(0.02)
    for mine, full, ids, prompt in zip(ours, exact, whole, PROMPTS, strict=True):
        assert (mine - chosen(full, ids)).abs().max() <= allowed
        answered = full[len(prompt) - 1 :]
        regret = answered.max(dim=-1).values - chosen(full, ids)[len(prompt) - 1 :]
        assert regret.max() <= 2 * allowed


def chosen(logprobs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Of the tokens that came: [len(tokens) - 1]"""
    return logprobs.gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)
