"""GGUF files of the hub: ``hf:USER/REPO:QUANTIZATION`` is downloaded, found again without the hub,
and listed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixrt.base.errors import ConfigError, NotCachedError
from radixrt.cli.chat.local_server import _is_the_same
from radixrt.device.machine import OTHER_BYTES
from radixrt.models.checkpoint import check_checkpoint, resolve_model_path
from radixrt.models.gguf import hub as hub_module
from radixrt.models.gguf.folder import gguf_tensors
from radixrt.models.images import why_no_images
from radixrt.models.local import local_models
from tests.servers.fake_hub import FakeHub

pytest.importorskip("gguf")

PARTS = ["two/m-Q4_K_M-00001-of-00002.gguf", "two/m-Q4_K_M-00002-of-00002.gguf"]


@pytest.fixture(scope="module")
def packed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a repository: one GGUF file, and one in two parts."""
    from tests.models.gguf_files import write_gguf

    folder = tmp_path_factory.mktemp("packed")
    whole = write_gguf(model_dir, folder / "whole.gguf").read_bytes()
    parts = [write_gguf(model_dir, folder / f"{i}.gguf", part=(i, 2)) for i in (0, 1)]
    split = dict(zip(PARTS, (part.read_bytes() for part in parts), strict=True))
    return {"README.md": b"#", "m-F32.gguf": whole, "mmproj-m-F16.gguf": b"", **split}


@pytest.fixture
def hub(
    packed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """The hub of this process, with an empty cache."""
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "hub"))
    with FakeHub(packed=packed, plain={"config.json": b"{}"}) as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield fake


@pytest.fixture
def go_offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_one_file_is_downloaded_and_found_again_without_the_hub(
    hub: FakeHub, go_offline: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    served = resolve_model_path("hf:maker/packed:f32")
    assert hub.downloads == ["m-F32.gguf"]
    assert check_checkpoint(served)["dtype"] == "float32"
    assert resolve_model_path("hf:maker/packed:m-F32.gguf") == served
    assert hub.downloads == ["m-F32.gguf"]
    assert "cache" not in caplog.text
    go_offline()
    assert resolve_model_path("hf:maker/packed:F32") == served
    assert "serving the copy in its cache" in caplog.text
    with pytest.raises(ConfigError, match=r"Q4_K_M is not in .*HF_HUB_OFFLINE"):
        resolve_model_path("hf:maker/packed:Q4_K_M")


def test_a_new_version_is_downloaded_and_the_old_one_serves_without_it(
    hub: FakeHub, packed: dict[str, bytes], go_offline: Callable[[], None]
) -> None:
    """Of a repository that has changed: the cache then has one quantization in the old version,
    another in the new one."""
    resolve_model_path("hf:maker/packed:F32")
    hub.repositories["maker/packed"] = packed | {"README.md": b"##"}
    resolve_model_path("hf:maker/packed:Q4_K_M")
    go_offline()
    assert resolve_model_path("hf:maker/packed:F32").name == "m-F32"
    assert {model.name: model.reason for model in local_models()} == {
        "hf:maker/packed:Q4_K_M": None,
        "hf:maker/packed:F32": None,
    }


def test_the_tower_comes_with_its_model(hub: FakeHub, packed: dict[str, bytes]) -> None:
    """One of several; one that can't be read leaves the model its text."""
    towers = dict.fromkeys(("mmproj-F16.gguf", "mmproj-F32.gguf", "other/mmproj.gguf"), b"none")
    hub.repositories["maker/packed"] = packed | towers
    served = resolve_model_path("hf:maker/packed:F32")
    assert sorted(hub.downloads) == ["m-F32.gguf", "mmproj-F16.gguf"]
    reason = why_no_images(served, check_checkpoint(served), "cpu")
    assert reason is not None and "mmproj-F16.gguf is no readable GGUF file" in reason


def test_all_parts_of_the_default_quantization_are_downloaded(
    hub: FakeHub, packed: dict[str, bytes], go_offline: Callable[[], None]
) -> None:
    served = resolve_model_path("hf:maker/packed")
    assert sorted(hub.downloads) == PARTS
    files = {entry.file for entry in gguf_tensors(served) or []}
    assert {Path(file).name for file in files} == {Path(part).name for part in PARTS}
    (model,) = local_models()
    assert (model.name, model.reason) == ("hf:maker/packed:Q4_K_M", None)
    assert model.bytes == sum(len(packed[part]) for part in PARTS)
    max(map(Path, files)).unlink()
    (model,) = local_models()
    assert "lacks 1 of the 2 files" in str(model.reason)
    go_offline()
    with pytest.raises(ConfigError, match="is not in the hub's cache"):
        resolve_model_path("hf:maker/packed")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf:maker/missing:Q8_0", r"hf:maker/missing:Q8_0 does not exist on the hub, or is private"),
        ("hf:maker/packed:Q8_0", r"no GGUF file Q8_0.*: hf:maker/packed:F32, hf:maker/packed:Q4_K_M$"),
        ("hf:maker/plain", r"no GGUF files; .*--model-path maker/plain, without hf:"),
        ("hf:maker/closed:F32", r"is gated: accept its terms at http.*/maker/closed"),
        ("hf:packed", r"hf:packed is no name of a GGUF file on the hub; the form is hf:USER/REPO:Q4_K_M"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(hub: FakeHub, name: str, reason: str) -> None:
    hub.repositories["maker/closed"] = hub.repositories["maker/packed"]
    hub.gated.add("maker/closed")
    with pytest.raises(ConfigError, match=reason):
        resolve_model_path(name)
    assert hub.downloads == []


def test_a_file_that_does_not_fit_is_not_downloaded_and_one_that_fits_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hub.repositories["maker/packed"]
    hub.repositories["maker/large"] = files | {"m-Q8_0.gguf": bytes(10 * len(files["m-F32.gguf"]))}
    room = len(files["m-F32.gguf"]) + 1
    monkeypatch.setattr(hub_module, "available_memory", lambda: room + OTHER_BYTES)
    with pytest.raises(ConfigError, match=r"room for .* that fits is hf:maker/large:F32 \("):
        resolve_model_path("hf:maker/large:Q8_0", check_room=True)
    with pytest.raises(NotCachedError, match=r"hf:maker/large:F32 is not in .* GB"):
        resolve_model_path("hf:maker/large:F32", download=False, check_room=True)
    assert hub.downloads == []
    assert resolve_model_path("hf:maker/large:F32").is_dir()
    assert resolve_model_path("hf:maker/large:F32", download=False).is_dir()
    monkeypatch.setattr(hub_module, "available_memory", lambda: 1)
    with pytest.raises(ConfigError, match="no file of this repository fits"):
        resolve_model_path("hf:maker/large:F32", check_room=True)


def test_a_hub_that_cannot_be_reached_is_named(hub: FakeHub) -> None:
    hub.__exit__()
    with pytest.raises(
        ConfigError, match=r"packed:F32 is not in .* the hub cannot be reached at http"
    ):
        resolve_model_path("hf:maker/packed:F32")


def test_the_command_line_downloads_from_hf_endpoint_with_progress(
    hub: FakeHub, tmp_path: Path
) -> None:
    log = tmp_path / "empty.jsonl"
    log.touch()
    command = ["-m", "radixrt.cli", "lint-prompts", "--model-path", "hf:maker/packed:F32", str(log)]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=60
    )
    assert hub.downloads == ["m-F32.gguf"], done.stderr
    assert "100%" in done.stderr
    assert [*(tmp_path / "home" / "hub").glob("models--maker--packed/snapshots/*/m-F32.gguf")]


def test_files_in_folders_are_listed(
    hub: FakeHub, packed: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "mine" / "deep"
    folder.mkdir(parents=True)
    for name in ("m-F32.gguf", *PARTS):
        (folder / Path(name).name).write_bytes(packed[name])
    assert [(Path(model.name), model.reason) for model in local_models([tmp_path / "mine"])] == [
        (folder / "m-F32.gguf", None),
        (folder / Path(PARTS[0]).name, None),
    ]
    with pytest.raises(ConfigError, match="There is no folder"):
        list(local_models([tmp_path / "nowhere"]))


def test_a_running_server_is_recognized_by_the_name_of_the_hub() -> None:
    served = {"id": "packed:Q4_K_M", "root": "/home/me/.cache/radixrt/gguf/0123/m-Q4_K_M"}
    assert _is_the_same(served, "hf:maker/packed:Q4_K_M")
    assert not _is_the_same(served, "hf:maker/packed:Q8_0")
