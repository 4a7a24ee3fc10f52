"""Measures the first token about an image, cold and warm, beside llama.cpp on the same GGUF files,
and the longest gap of another answer while images are seen.

    python -m bench.images [--rounds 5] [--small] [--peers-dir ~/.cache/radixrt/peers]

The model has Gemma 3's form and random weights: a language model of the size of the 270M, but for
its vocabulary, in Q8_0, and the tower of SigLIP base (86M) on 448x448 pixels in float16. A round asks each server
about an image that it has not seen (cold) and again (warm); a stream of tokens then runs while two
further images are seen. Each engine's first round warms it up. The servers run at the same time, the
idle one asleep.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from bench import children
from bench.local_server import comes_alive, free_port, local_server
from bench.markdown import markdown, median_and_range
from bench.peers_cpu.environments import llama_cpp_folder
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.loader import load_model
from radixrt.worker.threads import use_threads
from tests.image_checkpoints import make_image_checkpoint, picture, png
from tests.models.gguf_files import write_gguf
from tests.models.gguf_towers import Kind, write_mmproj

MAX_GAP_S = 0.1
"""Bar of the longest gap between tokens of a running answer."""
SIDE, PATCH, PLACEHOLDERS = 448, 14, 64
QUESTION = "What is in this picture?"
START_TIMEOUT_S = 60
TEXT = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": SIDE,
    "patch_size": PATCH,
}
SMALL = {"num_hidden_layers": 6}


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as temp, ExitStack() as servers:
        text, tower = make_files(Path(temp), SMALL if arguments.small else {})
        print(f"the tower alone: {median_and_range(tower_seconds(text), 3)} s", flush=True)
        flags = ("--served-model-name", "m", "--log-level", "warning")
        urls = {"radixrt": servers.enter_context(local_server(str(text), *flags))}
        peer = llama_cpp_folder(Path(arguments.peers_dir).expanduser()) / "bin/llama-server"
        if peer.is_file():
            urls["llama.cpp"] = servers.enter_context(llama_server(peer, text, tower))
        else:
            print(f"llama.cpp is not measured: there is no {peer}.")
        measure(urls, arguments.rounds)


def measure(urls: dict[str, str], rounds: int) -> None:
    """Print a table and the verdicts."""
    names = ("cold", "warm", "gap without images", "gap beside images")
    found: dict[str, dict[str, list[float]]] = {url: {name: [] for name in names} for url in urls}
    for number in range(rounds + 1):
        for engine, url in urls.items():
            image = of_image(10 * number)
            values = [first_token_s(url, image), first_token_s(url, image), longest_gap_s(url)]
            values.append(longest_gap_s(url, [of_image(10 * number + one) for one in (1, 2)]))
            for name, value in zip(names, values, strict=True):
                if number:
                    found[engine][name].append(value)
    rows = [
        {"seconds": engine} | {name: median_and_range(of[name], 3) for name in names}
        for engine, of in found.items()
    ]
    print("\n".join(markdown(rows)))
    if "llama.cpp" in found:
        for name in ("cold", "warm"):
            ratios = [
                ours / theirs
                for ours, theirs in zip(
                    found["radixrt"][name], found["llama.cpp"][name], strict=True
                )
            ]
            print(f"first token, {name}, radixrt / llama.cpp: {median_and_range(ratios, 2)}")
    gap = max(found["radixrt"]["gap beside images"])
    print(f"longest gap beside images: {gap:.3f} s, bar {MAX_GAP_S} s: {'held' if gap <= MAX_GAP_S else 'MISSED'}")  # fmt: skip


def make_files(folder: Path, changes: dict[str, int]) -> tuple[Path, Path]:
    """The GGUF files of the language model and of the tower."""
    checkpoint = make_image_checkpoint("gemma3", folder / "checkpoint")
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(checkpoint))
    text = config.text_config.to_dict() | TEXT | changes | {"vocab_size": vocabulary}
    for name in ("layer_types", "architectures"):
        text.pop(name, None)
    made = transformers.Gemma3Config(
        text_config=text,
        vision_config=config.vision_config.to_dict() | TOWER | changes,
        mm_tokens_per_image=PLACEHOLDERS,
        image_token_index=config.image_token_id,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(made)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("projection_weight"):
                weight.normal_(std=0.02)
    model.save_pretrained(checkpoint)
    processor = checkpoint / "processor_config.json"
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"image_seq_length": PLACEHOLDERS}))  # fmt: skip
    tower = write_mmproj(checkpoint, folder / "mmproj-F16.gguf", Kind.F16)
    return write_gguf(checkpoint, folder / "m-Q8_0.gguf", Kind.Q8_0), tower


def tower_seconds(text: Path, runs: int = 3) -> list[float]:
    """Seconds of the tower for an image, in this process."""
    use_threads(os.cpu_count() or 1)
    model, times = load_model(resolve_model_path(str(text)), kernels=NativeKernels()), []
    pixels = torch.rand(1, 3, SIDE, SIDE).to(model.dtype)
    for _ in range(runs + 1):
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in model.vision.pieces(pixels):
                pass
        times.append(time.perf_counter() - start)
    return times[1:]


@contextmanager
def llama_server(program: Path, text: Path, tower: Path) -> Iterator[str]:
    """Serve the files by llama.cpp until the block ends; yields its URL."""
    port = free_port()
    flags = f"--host 127.0.0.1 --port {port} --ctx-size 4096 --parallel 2 --threads {os.cpu_count()} --no-webui --jinja"
    command = [str(program), "--model", str(text), "--mmproj", str(tower), *flags.split()]
    url, log = f"http://127.0.0.1:{port}", text.with_suffix(".log")
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with (
        log.open("wb") as output,
        children.running(command, stdout=output, stderr=output, env=variables) as process,
    ):
        if not comes_alive(f"{url}/v1/models", process, START_TIMEOUT_S):
            raise SystemExit(f"llama.cpp did not start:\n{log.read_text(errors='replace')[-3000:]}")
        yield url


def of_image(seed: int) -> dict[str, Any]:
    """A content part with an image that depends on the seed."""
    url = f"data:image/png;base64,{png(picture(seed, SIDE, SIDE))}"
    return {"type": "image_url", "image_url": {"url": url}}


def first_token_s(url: str, image: dict[str, Any]) -> float:
    """Seconds from a request about an image to its first token."""
    start = time.perf_counter()
    return next(_times(url, [image, {"type": "text", "text": QUESTION}], 4)) - start


def longest_gap_s(url: str, images: list[dict[str, Any]] | None = None) -> float:
    """The longest time between two tokens of an answer, while others about images begin."""
    threads = [threading.Thread(target=first_token_s, args=(url, image)) for image in images or ()]
    times = []
    for moment in _times(url, [{"type": "text", "text": f"Count. {time.time()}"}], 400):
        times.append(moment)
        if len(times) == 1:
            for thread in threads:
                thread.start()
    if len(times) < 2:
        raise SystemExit(f"{url}: an answer of {len(times)} events has no gaps")
    for thread in threads:
        thread.join()
    return max(later - earlier for earlier, later in pairwise(times))


def _times(url: str, content: list[dict[str, Any]], count: int) -> Iterator[float]:
    """The moments at which events of an answer come that have text."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        if response.status_code != 200:
            raise SystemExit(f"{url}: {response.read().decode()[:2000]}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0]["delta"].get("content"):
                    yield time.perf_counter()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="six layers each, to try it")
    parser.add_argument("--peers-dir", default="~/.cache/radixrt/peers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
