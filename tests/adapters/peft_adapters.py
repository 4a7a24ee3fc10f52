"""Random LoRA adapters of tiny checkpoints, made and saved by peft: what tests serve and compare
with."""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

ALL_LINEAR: dict[str, Any] = {"target_modules": "all-linear", "r": 8, "lora_alpha": 12}

KINDS: dict[str, dict[str, Any]] = {
    "q_and_v": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 16},
    "all_linear": ALL_LINEAR,
    "rslora": ALL_LINEAR | {"use_rslora": True},
    "patterns": ALL_LINEAR
    | {
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 20},
        "alpha_pattern": {"q_proj": 9, "layers.0.self_attn.o_proj": 2},
    },
    "some_layers": {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": [0, 2], "r": 5},
    "regex": {"target_modules": r".*layers\.[12]\..*(k_proj|gate_proj)", "r": 16, "lora_alpha": 8},
    "all_but_some": ALL_LINEAR | {"exclude_modules": ["k_proj", "down_proj"]},
}
"""Configs by what is special about them. An ``alpha`` that is not the rank has a scaling to
forget."""

USUAL = ["q_and_v", "all_linear", "rslora", "patterns"]

FUSED = {
    "q_and_v": {"target_modules": ["qkv_proj"], "r": 8, "lora_alpha": 16},
    "some_layers": {"target_modules": ["gate_up_proj"], "layers_to_transform": [0, 2], "r": 5},
    "regex": {"target_modules": r".*layers\.[12]\..*(qkv_proj|down_proj)", "r": 16},
    "all_but_some": ALL_LINEAR | {"exclude_modules": ["qkv_proj", "down_proj"]},
}
"""The same for a checkpoint whose projections are fused."""


def base_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def config_of(kind: str, architecture: str) -> peft.LoraConfig:
    fields = FUSED.get(kind, KINDS[kind]) if architecture.startswith("phi3") else KINDS[kind]
    return peft.LoraConfig(task_type="CAUSAL_LM", **fields)


WITHOUT_OUT_PROJ = ("falcon_h1", "mamba2", "nemotron_h")
"""Families whose ``out_proj`` peft refuses to adapt."""


def config_of_everything(model: Any, rank: int = 4) -> peft.LoraConfig:
    """An adapter of every linear layer of a model, of its routers and of each of its experts."""
    names = [name for name, _ in model.named_parameters()]
    parameters = {
        ".".join(name.split(".")[-3:])
        for name in names
        if name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj"))
        or (name.endswith((".gate.weight", ".router.weight")) and not isinstance(
            model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear))
    }  # fmt: skip
    kind = model.config.get_text_config().model_type
    others = r"out_proj|.*\.out_proj|" if kind in WITHOUT_OUT_PROJ else ""
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules="all-linear",
        exclude_modules=rf"{others}.*vision.*",
        target_parameters=sorted(parameters) or None,
        r=rank,
        lora_alpha=7,
        rank_pattern={r"experts\.down_proj": 3, "o_proj": 2},
        alpha_pattern={r"experts\.down_proj": 5},
    )


def make_adapter(
    checkpoint: Path,
    folder: Path,
    config: peft.LoraConfig | None,
    seed: int = 0,
    size: float = 0.1,
) -> Any:
    """Save a random adapter in ``folder``; returns peft's model with it.

    peft's own ``lora_B`` is zero, which would hide every error.

    Args:
        config: None: of everything that the model has.
    """
    torch.manual_seed(seed)
    base = base_model(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config or config_of_everything(base))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name:
                weight.normal_(std=weight.shape[1] ** -0.5)
            if "lora_B" in name:
                weight.normal_(std=size)
    model.eval().save_pretrained(str(folder))
    return model
