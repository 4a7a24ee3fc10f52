"""A model that does not fit the memory is refused before anything is loaded or downloaded, with the
numbers."""

import json
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.image_parts import BYTES_OF_A_PIXEL
from radixrt.device.machine import OTHER_BYTES, available_memory
from radixrt.models import memory_need as needs
from radixrt.models.loader import load_model
from radixrt.models.memory_need import check_fits, engine_bytes, loads_into_memory, memory_need
from radixrt.supervisor.launch import prepare
from tests.checkpoints.image_checkpoints import make_image_checkpoint

GIB = 1 << 30


def machine(root: Path, available: int, files: dict[str, str], own: str = "0::/") -> int:
    """The available memory of a machine with these files of control groups."""
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    system = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\n",
        "proc/self/cgroup": own,
    }
    for name, text in (groups | system).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_memory(root)


def test_the_smallest_limit_of_all_control_groups_counts(tmp_path: Path) -> None:
    assert machine(tmp_path / "a", 8 * GIB, {"memory.max": "max\n"}) == 8 * GIB
    inside = {"memory.max": f"{6 * GIB}", "memory.current": f"{GIB}"}
    assert machine(tmp_path / "b", 8 * GIB, inside) == 5 * GIB
    cached = f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\n"
    assert machine(tmp_path / "c", 8 * GIB, inside | {"memory.stat": cached}) == 5 * GIB + GIB // 2
    nested = {f"up/down/{name}": text for name, text in inside.items()}
    nested |= {"up/memory.max": f"{4 * GIB}", "up/memory.current": f"{2 * GIB}"}
    assert machine(tmp_path / "d", 8 * GIB, nested, "0::/up/down/leaf\n") == 2 * GIB
    assert machine(tmp_path / "e", 8 * GIB, nested, "0::/elsewhere\n") == 8 * GIB
    old = {
        "memory/box/memory.limit_in_bytes": f"{3 * GIB}",
        "memory/box/memory.usage_in_bytes": f"{2 * GIB}",
        "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}",
        "memory/memory.usage_in_bytes": f"{2 * GIB}",
    }
    groups = "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n"
    assert machine(tmp_path / "f", 8 * GIB, old, groups) == GIB
    over = {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}
    assert machine(tmp_path / "g", 8 * GIB, over) == 0


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_need_is_a_close_lower_bound(
    checkpoint: Callable[[str], Path], dtype: str, quantization: str
) -> None:
    folder = checkpoint("llama")
    need = memory_need(folder, dtype=dtype, quantization=quantization)
    model = load_model(folder, dtype=dtype, quantization=quantization)
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    tables = sum(b.nbytes for name, b in model.named_buffers() if "cos_sin" in name)
    loaded = sum(tensors.values()) - tables
    assert need.in_memory <= loaded <= 1.2 * need.in_memory
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    assert need.in_files == sum(tensor.nbytes for of_file in files for tensor in of_file.values())
    if quantization == "auto":
        assert need.in_memory >= 0.95 * loaded


def loaded_bytes(folder: Path) -> int:
    model = load_model(folder, dtype="bfloat16", quantization="int8")
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values()) - sum(
        b.nbytes for name, b in model.named_buffers() if "cos_sin" in name
    )


def test_a_tower_is_counted_where_images_are_served(tmp_path: Path) -> None:
    folder = make_image_checkpoint("qwen3_vl", tmp_path)
    most = [
        engine_bytes(ServerConfig(model_path=str(folder), max_image_pixels=pixels), GIB)
        for pixels in (1 << 20, 1 << 24)
    ]
    assert most[1] - most[0] == 15 * BYTES_OF_A_PIXEL << 20, "one image is prepared at a time"
    sees = memory_need(folder, dtype="bfloat16", quantization="int8").in_memory
    assert sees <= loaded_bytes(folder) <= 1.2 * sees
    (folder / "preprocessor_config.json").unlink()
    blind = memory_need(folder, dtype="bfloat16", quantization="int8").in_memory
    assert blind <= loaded_bytes(folder) <= 1.2 * blind
    towers = [t for name, t in load_file(folder / "model.safetensors").items() if "visual" in name]
    assert sees - blind == 2 * sum(tensor.numel() for tensor in towers)


def test_a_gguf_file_needs_its_bytes_and_16_bits_for_kinds_that_are_not_packed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from gguf import GGMLQuantizationType

    from radixrt.models.gguf.folder import checkpoint_folder
    from tests.models.gguf_files import write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {}
    for kind in ("Q8_0", "NVFP4"):

        def of(name: str, kind: str = kind) -> GGMLQuantizationType:
            return GGMLQuantizationType["Q4_0" if "down_proj" in name else kind]

        file = write_gguf(model_dir, tmp_path / f"{kind}.gguf", of)
        sizes[kind] = memory_need(checkpoint_folder(file))
    assert sizes["Q8_0"].unpacked == 0 and sizes["Q8_0"].in_memory <= sizes["Q8_0"].in_files
    assert sizes["NVFP4"].unpacked > 3 * sizes["NVFP4"].in_files / 2
    with pytest.raises(ConfigError, match=r"GB have kinds that are kept in 16 bits.* available"):
        monkeypatch.setattr(needs, "available_memory", lambda: 1 << 20)
        check_fits(sizes["NVFP4"])


def test_each_replica_needs_weights_of_its_own(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    weights = memory_need(folder).in_memory
    monkeypatch.setattr(needs, "available_memory", lambda: weights + OTHER_BYTES)
    monkeypatch.setattr("radixrt.models.memory_need.has_gpu", lambda: False)
    prepare(ServerConfig(model_path=str(folder)))
    with pytest.raises(ConfigError, match="in each of 2 engines"):
        prepare(ServerConfig(model_path=str(folder), dp=2))


def test_nothing_is_counted_that_is_not_loaded(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Tied heads, also where config.json leaves the default, and layers behind the last one."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    tensors = load_file(folder / "model.safetensors")
    plain = {name: one for name, one in tensors.items() if name != "lm_head.weight"}
    further = {f"model.layers.{config['num_hidden_layers']}.x.weight": torch.zeros(9, 9)}
    sizes = []
    for ties in ({"tie_word_embeddings": True}, {}):
        kept = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
        (folder / "config.json").write_text(json.dumps(kept | ties))
        for stored in (plain, plain | further | {"lm_head.weight": torch.zeros(99, 99)}):
            save_file(stored, folder / "model.safetensors")
            sizes.append(memory_need(folder, quantization="int4").in_memory)
    assert len(set(sizes)) == 1


def test_weights_on_a_gpu_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "has_gpu", lambda: False)
    assert [loads_into_memory(device) for device in ("cpu", "auto", "cuda")] == [True, True, False]
    monkeypatch.setattr(needs, "has_gpu", lambda: True)
    assert [loads_into_memory(device) for device in ("cpu", "auto", "cuda")] == [True, False, False]


def huge(folder: Path, source: Path) -> Path:
    """A checkpoint of 4 TB, in a file without blocks."""
    config = json.loads((source / "config.json").read_text())
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config |= {"num_hidden_layers": 1, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    shape = [1 << 20, 1 << 21]
    header = {"model.a.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 << 41]}}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + (2 << 41))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights of a GPU do not lie in this memory")
@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_model_that_does_not_fit_is_refused_in_seconds(
    checkpoint: Callable[[str], Path], tmp_path: Path, command: str
) -> None:
    try:
        folder = str(huge(tmp_path, checkpoint("llama")))
    except OSError:
        pytest.skip("this file system has no files of 4 TB")
    flags = (
        ["--model-path", folder, "--port", "0"] if command == "serve" else [folder, "--port", "0"]
    )
    done = subprocess.run(
        [sys.executable, "-m", "radixrt.cli", command, *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    printed = done.stdout + done.stderr
    assert "needs at least 4398.6 GB of memory" in " ".join(printed.split()), printed
    assert "Traceback" not in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights of a GPU do not lie in this memory")
def test_a_worker_that_is_killed_while_it_loads_is_reported_with_both_numbers(
    model_dir: Path, tmp_path: Path
) -> None:
    """As the kernel kills a process that takes more memory than there is."""
    flags = ["--model-path", str(model_dir), "--device", "cpu", "--port", "0"]
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "radixrt.cli", "serve", *flags]
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while not (workers := workers_of(server.pid)):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.01)
        workers[0].kill()
        said = r"was killed while it loaded the model, probably because memory ran out. "
        numbers = r"Its weights need at least 0.00 GB, and \d+\.\d\d GB were available"
        while not re.search(said + numbers, log.read_text()):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    finally:
        server.terminate()
        server.wait(30)


def workers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "radixrt.worker" in child.cmdline()]
