"""Runs llama.cpp's converter, quantizer, server, and what writes its log-probabilities."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench import children
from bench.peers_cpu.engines import ADAPTERS, Engine
from bench.peers_cpu.environments import llama_cpp_folder, llama_cpp_sources
from bench.peers_cpu.serving import serving

MAX_DROP = 16.0
"""llama-perplexity writes log-probabilities further below the greatest as this difference."""
_NO_SPINNING = {"OMP_WAIT_POLICY": "passive"}
"""Threads that spin while they wait slow down other work; nothing is timed here."""


class LlamaCpp:
    """The environment that ``python -m bench.peers_cpu install llama.cpp`` makes, or else that of
    ``llama.cpp-avx2``."""

    def __init__(self, peers: Path) -> None:
        self.folder = llama_cpp_folder(peers.resolve())
        if not (self.folder / "bin" / "llama-perplexity").exists():
            sys.exit(f"{self.folder} has no llama-perplexity: python -m bench.peers_cpu install llama.cpp --peers-dir {peers}")  # fmt: skip

    def run(self, program: str, *arguments: str | Path) -> str:
        """Run one of its programs; returns the end of its output.

        Raises:
            RuntimeError: it failed.
        """
        command = [str(self.folder / "bin" / program), *map(str, arguments)]
        variables = {**os.environ, **_NO_SPINNING}
        done = children.run(
            command, capture_output=True, text=True, errors="replace", env=variables
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{(done.stderr or done.stdout)[-2000:]}")  # fmt: skip
        return str(done.stdout[-2000:])

    def convert(self, checkpoint: Path, target: Path, pre: str) -> Path:
        """Make a GGUF file in float32; ``pre`` names a byte-level tokenizer's pre-tokenizer."""
        script, sources = ADAPTERS / "gguf_conversion.py", llama_cpp_sources(self.folder)
        self.run("python", script, str(sources), checkpoint, target, "f32", pre)
        return target

    def quantize(self, file: Path, target: Path, kind: str) -> Path:
        self.run("llama-quantize", "--allow-requantize", file, target, kind)
        return target

    @contextlib.contextmanager
    def serve(self, file: Path) -> Iterator["Server"]:
        """Serve a file with one slot until the block ends."""
        flags = "--host 127.0.0.1 --port {port} --ctx-size 2048 --parallel 1 --threads 2 --no-webui"
        command = ("{environment}/bin/llama-server", "--model", "{model}", *flags.split())
        engine = Engine("llama.cpp", command, self.folder.name, _NO_SPINNING)
        log = file.with_suffix(".server.log")
        with serving(engine, file, file, self.folder.parent, log) as url:
            yield Server(url.removesuffix("/v1"))

    def log_probabilities(self, file: Path, text: Path, length: int, pages: int) -> "Pages":
        """Log-probabilities of the second half of each page of a text."""
        target = text.with_suffix(".logits")
        size = ("--ctx-size", str(length), "--batch-size", str(length), "--chunks", str(pages))
        self.run("llama-perplexity", "-m", file, "-f", text, *size, "--threads", "2", "--kl-divergence-base", target)  # fmt: skip
        return Pages.read(target)


class Server:
    """A running llama-server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=300)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text, control tokens included, without one at its beginning."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return list(self._post("/tokenize", body)["tokens"])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens of an answer; an end token is one of them and does not end it."""
        body = {"prompt": list(prompt), "n_predict": count, "temperature": 0}
        fixed = {"ignore_eos": False, "return_tokens": True, "cache_prompt": False}
        return list(self._post("/completion", {**body, **fixed})["tokens"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._client.post(path, json=body)
        response.raise_for_status()
        return response.json()


class Pages(NamedTuple):
    """What ``llama-perplexity --kl-divergence-base`` writes."""

    tokens: np.ndarray
    """[pages, length]; the first of each page is the beginning-of-sequence token, if any."""
    rows: np.ndarray
    """[pages, positions, 4 + vocabulary]: scale and offset as two float32 each, then 16-bit
    codes."""

    @staticmethod
    def read(file: Path) -> "Pages":
        header = np.fromfile(file, np.int32, 3, offset=8)
        length, vocabulary, pages = header.tolist()
        tokens = np.fromfile(file, np.int32, pages * length, offset=20).reshape(pages, length)
        positions, width = length - 1 - length // 2, 2 * ((vocabulary + 1) // 2) + 4
        start = 20 + 4 * pages * length
        rows = np.memmap(file, np.uint16, "r", start, (pages, positions, width))
        return Pages(tokens, rows)

    def log_probabilities(self, page: int, vocabulary: int) -> np.ndarray:
        """[positions, vocabulary] as float32, of the tokens after ``length // 2``, ``length // 2 +
        1``, ..."""
        rows = self.rows[page]
        scale, offset = np.ascontiguousarray(rows[:, :4]).view(np.float32).T
        return rows[:, 4 : 4 + vocabulary] * scale[:, None] + offset[:, None]
