"""Runs an engine's server while it is measured: starts it within a time, logs its output to a file,
ends it with all its processes."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench import children
from bench.local_server import comes_alive, free_port
from bench.peers_cpu.engines import Engine

START_TIMEOUT_S = 600
"""vLLM compiles on its first start, for minutes on two cores."""

_NAMED_ERROR = re.compile(r"\b\w*(Error|Exception)\b: \S.*")
_ERROR = re.compile(r"\berror\b.*", re.IGNORECASE)


class EngineFailedError(Exception):
    """An engine can't be measured; says why in a line."""


@contextlib.contextmanager
def serving(engine: Engine, checkpoint: Path, model: Path, peers: Path, log: Path) -> Iterator[str]:
    """Serve ``model``, made of ``checkpoint``, until the block ends; yields the base URL, which
    ends in /v1.

    Raises:
        EngineFailedError: it isn't installed, or ended or kept silent instead of serving.
    """
    port = free_port()

    def filled(text: str) -> str:
        return engine.filled(text, peers=peers, checkpoint=checkpoint, model=model, port=port)

    command = [filled(part) for part in engine.command]
    template = checkpoint / "chat_template.jinja"
    if engine.template_flag and template.is_file():
        command += [engine.template_flag, str(template)]
    if not Path(command[0]).exists():
        raise EngineFailedError(
            f"not installed: python -m bench.peers_cpu install {engine.environment}"
        )
    variables = {name: filled(value) for name, value in engine.variables.items()}
    url = f"http://127.0.0.1:{port}/v1"
    with (
        log.open("wb") as output,
        children.running(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        ) as process,
    ):
        if not comes_alive(f"{url}/models", process, START_TIMEOUT_S):
            if process.poll() is None:
                raise EngineFailedError(f"no answer within {START_TIMEOUT_S} s ({log})")
            why = first_line_of_why(log.read_text(errors="replace"))
            raise EngineFailedError(f"{why} (status {process.returncode}; {log})")
        yield url


def first_line_of_why(log_text: str) -> str:
    """The line of a server's output that says what went wrong: the first error with a name, else
    the first with the word, else the last line."""
    for pattern in (_NAMED_ERROR, _ERROR):
        if found := pattern.search(log_text):
            return found.group().strip()
    lines = log_text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
