"""The worked example of docs/internals/add_a_model.md works."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers

from radixrt.models import registry
from radixrt.models.loader import load_model
from tests import checkpoints
from tests.models.harness import Harness

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "add_a_model.md"


def test_the_model_of_the_document_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, entry, config, *_ = re.findall(r"```(?:python)?\n(.*?)```", DOCUMENT.read_text(), re.S)
    ((name, place),) = eval("{" + entry + "}").items()
    ((architecture, settings),) = eval("{" + config + "}").items()
    module = types.ModuleType("radixrt.models.ministral")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.ARCHITECTURES, name, place)
    monkeypatch.setitem(checkpoints.CONFIGS, architecture, settings)

    folder = checkpoints.make_checkpoint(architecture, tmp_path)
    prompt = list(range(5, 45))
    with torch.inference_mode():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        expected = theirs(torch.tensor([prompt])).logits[0]
    ours = Harness(load_model(folder), page_size=16).logits(prompt, chunk=7)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
