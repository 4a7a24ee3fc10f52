"""A tiny random checkpoint with the context length and the chat template that agents need."""

import json
from pathlib import Path

from tests.checkpoints import END_OF_TURN, make_checkpoint, make_tokenizer

CONTEXT = 131072

_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_agent_checkpoint(
    folder: Path, template: str = _TEMPLATE, architecture: str = "llama"
) -> Path:
    """Save a tiny model whose answers are random."""
    from transformers import PreTrainedTokenizerFast

    sizes = {"num_hidden_layers": 1} if architecture == "llama" else {}
    make_checkpoint(architecture, folder, max_position_embeddings=CONTEXT, **sizes)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_tokenizer(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    # so that it judges pairs of texts: its vocabulary has no single tokens for yes and no
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1", "type": "x.LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1").mkdir()
    (folder / "1/config.json").write_text('{"true_token_id": 40, "false_token_id": 41}')
    return folder


def end_soon(folder: Path) -> Path:
    """Let the end of the answer often be the likeliest token: a random model never ends an answer
    whose request names no limit and is greedy."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][END_OF_TURN] *= 3
    save_file(weights, file, metadata={"format": "pt"})
    return folder
