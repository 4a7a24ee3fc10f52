"""How a server starts, ends, and dies."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench import children
from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.liveness.link import SupervisorLink
from radixrt.cli.main import main
from radixrt.supervisor.launch import bind
from radixrt.tokenizer.process import run_tokenizer
from radixrt.worker.process import pick_device
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.server.dialects import DIALECTS, DialectStream, assert_refused, whole_answer
from tests.server.test_takeover import Stream, process_of, request, until, wait_until_unready
from tests.servers import Server, run_server


def assert_all_gone(processes: list[psutil.Process], timeout: float = 10) -> None:
    _, alive = psutil.wait_procs(processes, timeout)
    assert not alive, f"left behind: {alive}"


IN_FULL = "RADIXRT_TORTURE" in os.environ
"""`make torture` tries all signals."""


@contextlib.contextmanager
def busy_server(
    served_checkpoint: Path, tmp_path: Path, *flags: str, worker_stands: bool = False
) -> Iterator[tuple[Server, Stream]]:
    """A server that streams an answer. Its current folder has a file with the name of a library's:
    it is not imported.

    Args:
        worker_stands: the worker is suspended, so that the answer does not end.
    """
    (tmp_path / "http.py").write_text("raise SystemExit('imported by accident')")
    flags = ("--served-model-name", "tiny", *flags)
    server = run_server(served_checkpoint, *flags, cwd=tmp_path).start()
    family = server.family()
    while True:
        stream = Stream(server, request(temperature=0, max_tokens=400))
        reading = threading.Thread(target=stream.run)
        reading.start()
        stream.wait_for_events()
        if not worker_stands:
            break
        (worker := process_of(server, "worker")).suspend()
        if server.info()["stats"]["running"]:
            break
        worker.resume()  # the answer was faster
    yield server, stream
    reading.join(30)
    assert_all_gone(family)
    assert list(server.temp_dir.iterdir()) == []
    server.remove()


def test_sigterm_lets_running_answers_end_refuses_new_ones_and_leaves_nothing(
    served_checkpoint: Path, tmp_path: Path
) -> None:
    slow = ("--shutdown-grace", "120", "--step-timeout", "120")  # the machine may be busy
    with busy_server(served_checkpoint, tmp_path, *slow) as (server, stream):
        until(lambda: has_four_processes_and_helpers(server))
        worker = process_of(server, "worker")
        before = begun(server)
        expected = [whole_answer(server, dialect) for dialect in DIALECTS]
        streams = [DialectStream(server, dialect) for dialect in DIALECTS]
        with ThreadPoolExecutor(2 * len(streams)) as threads:
            worker.suspend()  # no answer ends before the others are refused
            texts = [threads.submit(stream.run) for stream in streams]
            texts += [threads.submit(whole_answer, server, dialect) for dialect in DIALECTS]
            until(lambda: begun(server) >= before + 3 * len(DIALECTS), timeout_s=60)
            enough = output_tokens(server) + 100 * len(texts)  # of the 300 of each answer
            while not all(stream.text for stream in streams):
                assert not any(text.done() for text in texts)
                if output_tokens(server) < enough:
                    worker.resume()
                    time.sleep(0.01)
                    worker.suspend()
                time.sleep(0.1)  # until the texts of these steps have come
            assert not any(text.done() for text in texts)
            server.process.terminate()
            wait_until_unready(server, "shutting down")
            for dialect in DIALECTS:
                assert_refused(server, dialect, "shutting down")
            worker.resume()
            assert [text.result() for text in texts] == expected * 2
        assert server.process.wait(120) == 0
    assert stream.finish == {0: "length"} and stream.usage["completion_tokens"] == 400


def has_four_processes_and_helpers(server: Server) -> bool:
    """Helpers compile grammars. A process that starts has the command of its parent for a
    moment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        commands = [process.cmdline() for process in server.family()]
        helpers = [command for command in commands if "radixrt.constrained" in command]
        return len(commands) - len(helpers) == 4 and len(helpers) <= 3
    return False


def begun(server: Server) -> int:
    """Answers that have come to the scheduler."""
    stats = server.info()["stats"]
    return stats["running"] + stats["waiting"] + stats["finished"]


def output_tokens(server: Server) -> int:
    """Tokens of all answers so far."""
    return int(server.info()["stats"]["output_tokens"])


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGTERM, signal.SIGINT)]
    + IN_FULL * [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)],
)
def test_sigint_or_a_second_signal_ends_at_once_with_an_error_event(
    served_checkpoint: Path, tmp_path: Path, signals: tuple[int, ...]
) -> None:
    with busy_server(served_checkpoint, tmp_path, worker_stands=True) as (server, stream):
        for signum in signals:
            server.process.send_signal(signum)
            time.sleep(0.2)
        assert server.process.wait(20) == 0
    assert "stopped" in stream.error


@pytest.mark.parametrize("victim", ["supervisor"] + IN_FULL * ["api"])
def test_a_killed_supervisor_or_api_process_takes_all_others_along(
    served_checkpoint: Path, tmp_path: Path, victim: str
) -> None:
    """The death of the others does not: tests/server/test_takeover.py. An api process that hangs is
    killed in tests/server/test_hangs.py."""
    with busy_server(served_checkpoint, tmp_path) as (server, _):
        if victim == "supervisor":
            server.process.kill()
        else:
            (process,) = [p for p in server.family() if "radixrt.api" in p.cmdline()]
            process.kill()
            assert server.process.wait(20) == 1
            until(lambda: "The api process was killed by SIGKILL" in "".join(server.log))


@pytest.mark.parametrize("delay_s", [0.3, 1.0])
def test_a_signal_during_start_leaves_nothing(served_checkpoint: Path, delay_s: float) -> None:
    server = run_server(served_checkpoint)
    time.sleep(delay_s)
    family = server.family()
    server.process.terminate()
    server.process.wait(20)
    assert_all_gone(family)
    assert list(server.temp_dir.iterdir()) == []
    server.remove()


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """``refusal(model, *flags)``: the one sentence of a command that starts no process, in this
    one."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in signals]

    def sentence(model: Path | str, *flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--model-path", str(model), "--port", "0", *flags])
        told = capsys.readouterr().err
        assert ended.value.code not in (0, None) and "Traceback" not in told
        sentences = [line for line in told.splitlines() if line.startswith("radixrt")]
        assert len(sentences) == 1, told
        return sentences[0]

    yield sentence
    for signum, handler in zip(signals, before, strict=True):
        signal.signal(signum, handler)


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
        late = ("--max-total-tokens", "999999999999")  # which the worker would refuse
        assert f"Port {port} on 127.0.0.1 is in use" in failure(
            served_checkpoint, "--port", str(port), *late
        )


def test_a_port_is_taken_from_the_start() -> None:
    """Also while its server still loads, and so answers nobody."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="is in use by another program"):
            bind("127.0.0.1", port)


def test_missing_and_broken_checkpoints(
    refusal: Callable[..., str], served_checkpoint: Path, tmp_path: Path
) -> None:
    assert "there is no such folder" in failure(tmp_path / "nowhere")
    assert "config.json" in refusal(tmp_path)
    broken = make_tokenizer(make_checkpoint("llama", tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged" in refusal(broken)
    weights.unlink()
    assert "holds no weights" in refusal(broken)
    config = broken / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    unknown = refusal(broken)
    assert "Not yet: MambaForCausalLM" in unknown and "nearest supported model is Qwen/" in unknown


def test_missing_and_broken_chat_templates(
    refusal: Callable[..., str], served_checkpoint: Path, tmp_path: Path
) -> None:
    assert "no such file" in refusal(served_checkpoint, "--chat-template", str(tmp_path / "none"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    assert f"{broken}, line 1" in failure(served_checkpoint, "--chat-template", str(broken))


def test_missing_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # so that the process does not set it
    config = ServerConfig(model_path=str(make_checkpoint("llama", tmp_path)))
    with pytest.raises(ConfigError, match="okenizer"):
        run_tokenizer(config, Channels(tmp_path), argparse.Namespace(), SupervisorLink())


def test_too_little_memory_for_the_kv_pool(served_checkpoint: Path) -> None:
    assert "--max-total-tokens 999999999999 needs" in failure(
        served_checkpoint, "--max-total-tokens", "999999999999"
    )


def test_settings_out_of_range(refusal: Callable[..., str], served_checkpoint: Path) -> None:
    assert "--page-size must be" in refusal(served_checkpoint, "--page-size", "0")
    assert "--api-key is empty" in refusal(served_checkpoint, "--api-key", "")
    assert "--tokenizer-path /nowhere" in refusal(served_checkpoint, "--tokenizer-path", "/nowhere")
    assert "--context-length 99999 is more than" in refusal(
        served_checkpoint, "--context-length", "99999"
    )
    with pytest.raises(ConfigError, match="--device cuda"):  # by the worker
        pick_device("cuda", 0)
