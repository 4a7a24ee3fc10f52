"""A tiny checkpoint whose tokenizer and chat template know reasoning, and adapters of it."""

from pathlib import Path

import peft

from tests.adapters.peft_adapters import ALL_LINEAR, make_adapter
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, make_tokenizer

CONTEXT = 2048
PARSER_FLAGS = (
    *("--served-model-name", "tiny", "--reasoning-parser", "deepseek-r1"),
    *("--tool-call-parser", "hermes"),
)
"""Flags of a server of this checkpoint."""
END_OF_THINKING = VOCAB_SIZE + 1
"""Id of ``</think>``."""
ADAPTERS = {"one": None, "two": None, "activated": [END_OF_THINKING - 1, END_OF_THINKING]}
"""Adapters of a checkpoint, and the tokens that invoke them: ``<think></think>``."""


def adapter_flags(checkpoint: Path) -> tuple[str, ...]:
    """Flags of a server with the adapters of a checkpoint, which are made."""
    for seed, (name, tokens) in enumerate(ADAPTERS.items()):
        if not (checkpoint / name).exists():
            config = peft.LoraConfig(
                task_type="CAUSAL_LM", alora_invocation_tokens=tokens, **ALL_LINEAR
            )
            make_adapter(checkpoint, checkpoint / name, config, seed=seed, size=0.4)
    return ("--lora", *(f"{name}={checkpoint / name}" for name in ADAPTERS))


_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>\\n' }}{% endif %}{% endif %}"
)


def make_reasoning_checkpoint(folder: Path, architecture: str = "llama") -> Path:
    """Save a tiny model in float32 whose answers begin inside the reasoning, unless
    ``enable_thinking`` is false."""
    from transformers import PreTrainedTokenizerFast

    make_checkpoint(
        architecture,
        folder,
        vocab_size=VOCAB_SIZE + 2,
        max_position_embeddings=CONTEXT,
        dtype="float32",
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_tokenizer(folder))
    assert len(tokenizer) <= VOCAB_SIZE
    tokenizer.add_tokens(["<think>", "</think>"])
    assert tokenizer.convert_tokens_to_ids("</think>") == END_OF_THINKING
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
