"""How a server starts, ends, and dies."""

import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench import children
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.servers import Server, run_server


def assert_all_gone(processes: list[psutil.Process], timeout: float = 10) -> None:
    _, alive = psutil.wait_procs(processes, timeout)
    assert not alive, f"left behind: {alive}"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_socket(
    served_checkpoint: Path, tmp_path: Path, signum: int
) -> None:
    """Also of a server whose current folder has a file with the name of a library's: it is not imported."""
    (tmp_path / "http.py").write_text("raise SystemExit('imported by accident')")
    server = run_server(served_checkpoint, cwd=tmp_path).start()
    family = server.family()
    helpers = [p for p in family if "radixrt.constrained" in p.cmdline()]
    assert len(family) - len(helpers) == 4 and len(helpers) <= 3
    server.process.send_signal(signum)
    assert server.process.wait(20) == 0
    assert_all_gone(family)
    assert list(server.temp_dir.iterdir()) == []
    server.remove()


def test_a_killed_supervisor_takes_its_processes_along(start_server: Callable[..., Server]) -> None:
    server = start_server()
    family = server.family()
    server.process.kill()
    assert_all_gone(family)
    assert list(server.temp_dir.iterdir()) == []


def test_a_signal_during_start_leaves_nothing(served_checkpoint: Path) -> None:
    for delay in (0.3, 1.0):
        server = run_server(served_checkpoint)
        time.sleep(delay)
        family = server.family()
        server.process.terminate()
        server.process.wait(20)
        assert_all_gone(family)
        assert list(server.temp_dir.iterdir()) == []
        server.remove()


def test_death_of_the_api_process_is_reported_and_ends_the_server(
    start_server: Callable[..., Server],
) -> None:
    """That of the others does not: tests/server/test_takeover.py."""
    server = start_server()
    family = server.family()
    (process,) = [p for p in family if "radixrt.api" in p.cmdline()]
    process.kill()
    assert server.process.wait(20) == 1
    assert "The api process was killed by SIGKILL" in "".join(server.log)
    assert_all_gone(family)


def failure(model: Path | str, *flags: str) -> str:
    """The one sentence of a server that can't start."""
    command = [
        sys.executable,
        "-m",
        "radixrt.launch_server",
        "--model-path",
        str(model),
        "--port",
        "0",
        *flags,
    ]
    result = children.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    sentences = [line for line in result.stderr.splitlines() if line.startswith("radixrt")]
    assert len(sentences) == 1 and "Traceback" not in result.stderr, result.stderr
    return sentences[0]


def test_port_in_use(served_checkpoint: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        begin = time.monotonic()
        assert f"Port {port} on 127.0.0.1 is in use" in failure(
            served_checkpoint, "--port", str(port)
        )
        assert time.monotonic() - begin < 5


def test_missing_and_broken_checkpoints(served_checkpoint: Path, tmp_path: Path) -> None:
    assert "there is no such folder" in failure(tmp_path / "nowhere")
    assert "config.json" in failure(tmp_path)
    broken = make_tokenizer(make_checkpoint("llama", tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged" in failure(broken)
    weights.unlink()
    assert "holds no weights" in failure(broken)
    config = broken / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    refusal = failure(broken)
    assert "MambaForCausalLM" in refusal and "Qwen3ForCausalLM" in refusal


def test_missing_and_broken_chat_templates(served_checkpoint: Path, tmp_path: Path) -> None:
    assert "no such file" in failure(served_checkpoint, "--chat-template", str(tmp_path / "none"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    assert f"{broken}, line 1" in failure(served_checkpoint, "--chat-template", str(broken))


def test_missing_tokenizer(tmp_path: Path) -> None:
    assert "okenizer" in failure(make_checkpoint("llama", tmp_path))


def test_too_little_memory_for_the_kv_pool(served_checkpoint: Path) -> None:
    assert "--max-total-tokens 999999999999 needs" in failure(
        served_checkpoint, "--max-total-tokens", "999999999999"
    )
    assert "less than one page" in failure(served_checkpoint, "--max-total-tokens", "3")


def test_settings_out_of_range(served_checkpoint: Path) -> None:
    assert "--page-size must be" in failure(served_checkpoint, "--page-size", "0")
    assert "--api-key is empty" in failure(served_checkpoint, "--api-key", "")
    assert "--tokenizer-path /nowhere" in failure(served_checkpoint, "--tokenizer-path", "/nowhere")
    assert "--context-length 99999 is more than" in failure(
        served_checkpoint, "--context-length", "99999"
    )
    assert "--device cuda" in failure(served_checkpoint, "--device", "cuda")
