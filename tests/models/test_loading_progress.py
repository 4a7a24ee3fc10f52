"""Progress of loading weights, by a clock and with file sizes that the tests set."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from radixrt.models import loader
from radixrt.models.loading_progress import LoadingProgress

GB = 10**9


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def weights(folder: Path, *num_bytes: int) -> list[Path]:
    """Sparse files of these sizes."""
    files = [folder / f"model-{i}.safetensors" for i in range(len(num_bytes))]
    for file, size in zip(files, num_bytes, strict=True):
        with file.open("wb") as out:
            out.truncate(size)
    return files


def load(files: list[Path], seconds_a_tensor: float) -> None:
    """Four tensors a file, a quarter of the file each."""
    clock = Clock()
    progress = LoadingProgress(files, clock=clock)
    for file in files:
        for _ in range(4):
            clock.now += seconds_a_tensor
            progress.add_tensor(file.stat().st_size // 4)
        progress.add_file()


def test_a_large_checkpoint_reports_files_and_bytes_every_two_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load(weights(tmp_path, 4 * GB, 4 * GB, 2 * GB), seconds_a_tensor=0.75)
    assert caplog.messages == [
        "Loading weights: 0 of 3 files, 3.0 of 10.0 GB.",  # at 2.25 s
        "Loading weights: 1 of 3 files, 6.0 of 10.0 GB.",  # at 4.5 s
        "Loading weights: 2 of 3 files, 8.5 of 10.0 GB.",  # at 6.75 s
        "Loading weights: 2 of 3 files, 10.0 of 10.0 GB.",  # at 9 s
    ]


def test_a_single_file_reports_bytes_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load(weights(tmp_path, 8 * GB), seconds_a_tensor=1.1)
    assert caplog.messages == [
        "Loading weights: 4.0 of 8.0 GB.",
        "Loading weights: 8.0 of 8.0 GB.",
    ]


def test_a_checkpoint_that_loads_within_two_seconds_reports_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load(weights(tmp_path, GB, GB), seconds_a_tensor=0.24)
    assert caplog.messages == []


def test_the_lines_have_the_level_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = LoadingProgress(weights(tmp_path, GB), logging.DEBUG, clock)  # of a rank but 0
    clock.now += 5
    progress.add_tensor(GB)
    assert caplog.messages == []


def test_each_tensor_and_each_file_counts_after_it_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    class Recorder:
        def __init__(self, files: list[Path], level: int) -> None:
            events.append([file.name for file in files])

        def add_tensor(self, num_bytes: int) -> None:
            events.append(num_bytes)

        def add_file(self) -> None:
            events.append("file")

    shards = {
        "1.safetensors": {"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.bfloat16)},
        "2.safetensors": {"c": torch.zeros(7)},
    }
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    index = {"weight_map": {key: name for name, tensors in shards.items() for key in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(loader, "LoadingProgress", Recorder)
    for name, _tensor in loader.read_tensors(tmp_path):
        events.append(name)
    expected = [list(shards), "a", 12, "b", 10, "file", "c", 28, "file"]
    assert events == expected
