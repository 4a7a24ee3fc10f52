"""Offers the models on this machine, and recommended ones that fit its memory, to those who name
none."""

import logging
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixrt.base.config import DEMO_MODEL
from radixrt.cli.chat.client import ChatError
from radixrt.models.local import local_models, other_folders
from radixrt.models.memory_need import room_for_weights

KV_SHARE = 1.25
"""Memory of a model with some KV, in multiples of its file's size."""
MAX_OFFERED = 5
"""Recommended models that are shown."""
MAX_LOCAL = 15
"""Models of this machine that are shown."""


class Recommended(NamedTuple):
    """A GGUF file of the hub."""

    name: str
    """The value of ``--model-path``."""
    gigabytes: float
    """Approximate size of the file, by the repository's page. The download shows the exact one."""
    licence: str
    note: str


RECOMMENDED = (
    Recommended("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0", 0.6, "Apache 2.0", "the quickest"),
    Recommended("hf:ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", 0.8, "Gemma", "small, without reasoning"),
    Recommended("hf:Qwen/Qwen3-1.7B-GGUF:Q8_0", 1.8, "Apache 2.0", "small"),
    Recommended("hf:Qwen/Qwen3-4B-GGUF:Q4_K_M", 2.5, "Apache 2.0", "good on most laptops"),
    Recommended("hf:ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", 2.5, "Gemma", "good, without reasoning"),
    Recommended("hf:Qwen/Qwen3-8B-GGUF:Q4_K_M", 5.0, "Apache 2.0", "better, half as fast"),
    Recommended("hf:ggml-org/gpt-oss-20b-GGUF", 12.1, "Apache 2.0", "large, quick for its size"),
    Recommended("hf:Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18.6, "Apache 2.0", "the best of these"),
)  # fmt: skip
"""Instruction-tuned models of architectures that are served packed, by size."""
DEFAULT_GIGABYTES = 2.5
"""The largest that is the default: larger ones are slow on usual CPUs."""


def fitting(room: int) -> list[Recommended]:
    """The recommended models for so many bytes of memory, largest last."""
    fits = [one for one in RECOMMENDED if one.gigabytes * KV_SHARE * 1e9 <= room]
    return fits[-MAX_OFFERED:]


def nothing_named(url: str) -> ChatError:
    """The error of a command that names no model, where nobody can be asked."""
    fits = fitting(room_for_weights())
    download = f", `radixrt run {_default(fits).name}` downloads a small one" if fits else ""
    return ChatError(
        f"No server answers at {url}, and no model is named. `radixrt models` lists those on this machine{download}, and "
        f"`radixrt run {DEMO_MODEL}` starts the built-in demonstration."
    )


def choose_model(console: Console) -> str:
    """Show the choices and ask for one.

    Raises:
        ChatError: the input ends.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # about damaged entries
    table = Table("", "model", "GB", "licence", "", box=None)
    table.columns[1].no_wrap = True  # to be copied
    choices: list[str] = []
    for model in local_models(other_folders()):
        if model.reason is None and len(choices) < MAX_LOCAL:
            choices.append(model.name)
            _add(table, choices, f"{model.bytes / 1e9:.1f}", "", "on this machine")
    fits = [one for one in fitting(room_for_weights()) if one.name not in choices]
    default = choices[0] if choices else _default(fits).name if fits else DEMO_MODEL
    for one in fits:
        choices.append(one.name)
        _add(table, choices, f"~{one.gigabytes:g}", one.licence, f"downloaded: {one.note}")
    choices.append(DEMO_MODEL)
    _add(table, choices, "0.0", "", "a demonstration: answers only about facts in its prompt")
    console.print("No server runs here, and no model is named. These fit this machine:\n")
    console.print(table)
    number = choices.index(default) + 1
    while True:
        try:
            console.print(f"\nNumber, or another model's name (Enter: {number}): ", end="")
            answer = input().strip() or str(number)
        except EOFError:
            raise ChatError("No model was chosen.") from None
        if not answer.isdecimal():
            return answer
        if 1 <= int(answer) <= len(choices):
            return choices[int(answer) - 1]
        console.print(f"Give a number from 1 to {len(choices)}.")


def _default(fits: list[Recommended]) -> Recommended:
    usual = [one for one in fits if one.gigabytes <= DEFAULT_GIGABYTES and "Qwen" in one.name]
    return (usual or fits)[-1]


def _add(table: Table, choices: list[str], *cells: str) -> None:
    table.add_row(str(len(choices)), *map(Text, (choices[-1], *cells)))
