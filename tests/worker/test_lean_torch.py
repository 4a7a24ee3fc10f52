"""Torch without the parts that a worker does not use."""

import json
import subprocess
import sys

import pytest

from radixrt.device import lean_torch
from radixrt.device.host_memory import has_gpu

SHOW = """
import json, sys
from radixrt.device.lean_torch import postpone_unused_parts
if sys.argv[1] == "lean":
    postpone_unused_parts()
import torch
names = [name for name in sys.modules if name.startswith("torch.")]
layer = torch.nn.Linear(4, 4)
torch.optim.SGD(layer.parameters(), lr=0.1)  # it runs when it is used
drawn = torch.distributions.Normal(0.0, 1.0).sample()
print(json.dumps([len(names), layer(torch.ones(4)).shape[0], drawn.dim()]))
"""


def run(mode: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", SHOW, mode], capture_output=True, check=True)
    result: list[int] = json.loads(done.stdout)
    return result


@pytest.mark.skipif(has_gpu(), reason="torch is imported whole on a machine with a GPU")
def test_unused_parts_of_torch_are_imported_when_they_are_used() -> None:
    lean, whole = run("lean"), run("whole")
    assert lean[1:] == whole[1:] == [4, 0]
    assert lean[0] < whole[0] - 150


def test_a_version_of_torch_that_was_not_tried_is_imported_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lean_torch, "_TRIED", ("0.1.",))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = list(sys.meta_path)
    lean_torch.postpone_unused_parts()
    assert sys.meta_path == before
