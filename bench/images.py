"""Measures the first token about an image, cold and warm, beside llama.cpp on the same GGUF files,
and the longest gap of another answer while images are seen.

    python -m bench.images [--rounds 5] [--seconds 210] [--small] [--peers-dir ~/.cache/radixrt/peers]
    python -m bench.images --large [--rounds 2]

The model has Gemma 3's form and random weights: a language model of the size of the 270M, but for
its vocabulary, in Q8_0, and the tower of SigLIP base (86M) on 448x448 pixels in float16. A round
asks each server about an image that it has not seen (cold) and again (warm); a stream of tokens
then runs while two further images are seen, until both are answered, and another one beside the
worst files that a client may send. Each engine's first round warms it up. The servers run at the same time,
the idle one asleep. Every value is printed when it is there.

--large measures the last of these alone, with a tower of Qwen2.5-VL's form, which reads images in
their own size: the tensor of the largest has 308 MB, and the prompt 16,384 tokens. Its layers are
few and narrow.
"""

import argparse
import base64
import functools
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from PIL import Image

from bench import children
from bench.local_server import comes_alive, free_port, local_server
from bench.markdown import markdown, median_and_range
from bench.peers_cpu.environments import llama_cpp_folder
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.loader import load_model
from radixrt.worker.threads import use_threads
from tests.checkpoints.image_checkpoints import make_image_checkpoint, picture, png
from tests.models.gguf_files import write_gguf
from tests.models.gguf_towers import Kind, write_mmproj

MAX_GAP_S = 0.1
"""Bar of the longest gap between tokens of a running answer."""
SIDE, PATCH, PLACEHOLDERS = 448, 14, 64
QUESTION = "What is in this picture?"
START_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 120
TOKENS_AROUND = 50
"""Tokens of the running answer before and behind the images."""
MAX_TOKENS = 6000
TEXT = {
    "max_position_embeddings": 8192,
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
LARGE = {
    "depth": 1,
    "hidden_size": 640,
    "intermediate_size": 1280,
    "num_heads": 8,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [],
}
LARGEST_PIXELS = 12_845_056


def main() -> None:
    arguments = _parse()
    end = time.monotonic() + arguments.seconds
    if arguments.large:
        measure_large(arguments.rounds, end)
        return
    with tempfile.TemporaryDirectory() as temp, ExitStack() as servers:
        text, tower = make_files(Path(temp), SMALL if arguments.small else {})
        print(f"the tower alone: {median_and_range(tower_seconds(text), 3)} s", flush=True)
        flags = ("--served-model-name", "m", "--log-level", "warning", "--speculation", "off")
        ours = servers.enter_context(local_server(str(text), *flags))
        engines = [Engine("radixrt", ours)]
        peer = llama_cpp_folder(Path(arguments.peers_dir).expanduser()) / "bin/llama-server"
        if peer.is_file():
            log = text.with_suffix(".log")
            url = servers.enter_context(llama_server(peer, text, tower, log))
            engines.append(Engine("llama.cpp", url, log))
        else:
            print(f"llama.cpp is not measured: there is no {peer}.")
        measure(engines, arguments.rounds, end)


@dataclass
class Engine:
    """A server, and what was measured with it."""

    name: str
    url: str
    log: Path | None = None
    """The file of its output, if it says there how long its tower took."""
    tokens: Sequence[int] = ()
    """Of which the answer consists, whose tokens are timed; empty: any."""
    found: dict[str, list[float]] = field(default_factory=dict)
    """Seconds by what took them, a value a round."""

    def note(self, name: str, seconds: float) -> None:
        """Note a value and print it, so that a run that is ended was not for nothing."""
        self.found.setdefault(name, []).append(seconds)
        print(f"  {self.name}, {name}: {seconds:.3f} s", flush=True)

    def tower_seconds(self) -> list[float]:
        """What its log says of its tower."""
        if self.log is None:
            return []
        text = self.log.read_text(errors="replace")
        return [int(found) / 1e3 for found in re.findall(r"encoded in (\d+) ms", text)]


def measure(engines: list[Engine], rounds: int, end: float) -> None:
    """Measure until the rounds or the time are over, and print a table and the verdicts. An engine
    that fails is left out from then on."""
    longest, failed = 0.0, set()
    for number in range(rounds + 1):
        begin = time.monotonic()
        if begin + longest > end:
            how = (
                "in the first round, which warms up"
                if number == 1
                else f"after {number - 1} rounds"
            )
            print(f"The time is over {how} (--seconds).")
            break
        print("to warm up" if number == 0 else f"round {number}", flush=True)
        for engine in engines:
            if engine.name in failed:
                continue
            if number == 1:
                engine.found.clear()
            try:
                look(engine, number, end)
            except (OSError, RuntimeError, httpx.HTTPError) as error:
                failed.add(engine.name)
                print(f"{engine.name} is left out: {type(error).__name__}: {error}")
                if engine.log is not None:
                    text = engine.log.read_text(errors="replace")
                    print(
                        *re.findall(r".*(?:ASSERT|error|failed|unsupported).*", text)[-5:], sep="\n"
                    )
        longest = max(longest, time.monotonic() - begin)
    report(engines)


def look(engine: Engine, number: int, end: float) -> None:
    """One round with one engine.

    Raises:
        RuntimeError, httpx.HTTPError: it does not answer, or not in time.
    """
    url = engine.url
    image, *others = (of_image(png(picture(10 * number + one, SIDE, SIDE))) for one in range(3))
    engine.note("cold", first_token_s(url, image, end))
    engine.note("warm", first_token_s(url, image, end))
    engine.note("gap without images", longest_gap_s(engine, [], end))
    engine.note(
        "gap beside images",
        longest_gap_s(
            engine, [functools.partial(first_token_s, url, one, end) for one in others], end
        ),
    )
    if engine.name == "radixrt":
        engine.note("gap beside bombs", gap_beside_bombs_s(engine, number, end))


def measure_large(rounds: int, end: float) -> None:
    """Measure the gaps beside images of which all pixels are read; print them and the verdict."""
    with tempfile.TemporaryDirectory() as temp, ExitStack() as servers:
        flags = ("--served-model-name", "m", "--log-level", "warning", "--speculation", "off")
        folder = make_large(Path(temp))
        url = servers.enter_context(local_server(str(folder), *flags))
        engine = Engine("radixrt", url, tokens=letters(folder))
        for number in range(rounds):
            engine.note("gap without images", longest_gap_s(engine, [], end))
            engine.note("gap beside bombs", gap_beside_bombs_s(engine, number, end))
        report([engine])


def gap_beside_bombs_s(engine: Engine, number: int, end: float) -> float:
    """The longest gap of an answer beside the worst files; those of a round are new to the server.
    Another process sends them, in a session of its own: Linux shares the processors among sessions,
    and this one must see tokens when they come."""
    with tempfile.TemporaryDirectory() as temp:
        bodies = []
        for index, file in enumerate(bombs(number)):
            bodies.append(Path(temp, str(index)))
            bodies[-1].write_bytes(body_of(file))
        command = [sys.executable, "-m", "bench.senders", engine.url, *map(str, bodies)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as sender:

            def send() -> None:
                assert sender.stdin is not None
                sender.stdin.close()
                if sender.wait(2 * REQUEST_TIMEOUT_S):
                    raise RuntimeError("an image was not answered")

            return longest_gap_s(engine, [send], end)


def report(engines: list[Engine]) -> None:
    """Print what was found."""
    measured = [engine for engine in engines if engine.found]
    if not measured:
        raise SystemExit("Nothing was measured.")
    names = list(measured[0].found)
    rows = [
        {"seconds": engine.name}
        | {name: median_and_range(engine.found.get(name) or [math.nan], 3) for name in names}
        for engine in measured
    ]
    print("\n".join(markdown(rows)))
    for engine in measured:
        if towers := engine.tower_seconds():
            print(f"the tower of {engine.name}, by its log: {median_and_range(towers, 3)} s")
    if [engine.name for engine in measured] == ["radixrt", "llama.cpp"]:
        ours, theirs = (engine.found for engine in measured)
        for name in ("cold", "warm"):
            pairs = zip(ours.get(name, ()), theirs.get(name, ()), strict=False)
            if ratios := [mine / other for mine, other in pairs]:
                print(f"first token, {name}, radixrt / llama.cpp: {median_and_range(ratios, 2)}")
    for name in ("gap beside images", "gap beside bombs"):
        if measured[0].name == "radixrt" and (gaps := measured[0].found.get(name)):
            verdict = "held" if max(gaps) <= MAX_GAP_S else "MISSED"
            print(f"longest {name}: {max(gaps):.3f} s, bar {MAX_GAP_S} s: {verdict}")


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


def make_large(folder: Path) -> Path:
    """A checkpoint whose images keep their size."""
    checkpoint = make_image_checkpoint("qwen2_5_vl", folder)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    for name, value in LARGE.items():
        setattr(config.vision_config, name, value)
    config.text_config.max_position_embeddings = 32768
    torch.manual_seed(1)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(checkpoint)
    file = checkpoint / "preprocessor_config.json"
    sizes = {"shortest_edge": 56 * 56, "longest_edge": LARGEST_PIXELS}
    settings = json.loads(file.read_text()) | {"patch_size": LARGE["patch_size"], "size": sizes}
    file.write_text(json.dumps(settings))
    return checkpoint


def letters(checkpoint: Path) -> list[int]:
    """The tokens that are letters: each is an event of its own, where parts of characters wait for
    the next."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return [index for token, index in tokenizer.get_vocab().items() if re.fullmatch("[a-z]", token)]


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
def llama_server(program: Path, text: Path, tower: Path, log: Path) -> Iterator[str]:
    """Serve the files by llama.cpp until the block ends; yields its URL."""
    port = free_port()
    flags = f"--host 127.0.0.1 --port {port} --ctx-size 8192 --parallel 4 --threads {os.cpu_count()} --no-webui --jinja"
    command = [str(program), "--model", str(text), "--mmproj", str(tower), *flags.split()]
    url = f"http://127.0.0.1:{port}"
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with (
        log.open("wb") as output,
        children.running(command, stdout=output, stderr=output, env=variables) as process,
    ):
        if not comes_alive(f"{url}/v1/models", process, START_TIMEOUT_S):
            raise SystemExit(f"llama.cpp did not start:\n{log.read_text(errors='replace')[-3000:]}")
        yield url


@functools.cache
def bombs(number: int) -> tuple[str, ...]:
    """The largest images that are taken as the smallest files, the largest file, one whose header
    names a false size, and one whose size is beyond the limit. Those of another number are other
    images."""
    large = Image.new("RGB", (4096, 4096), (9, 8, 7 + number))
    files = [png(large, form) for form in ("PNG", "JPEG", "WEBP")]
    noise = np.random.default_rng(number).integers(0, 256, (2560, 2560, 3), dtype=np.uint8)
    files.append(png(Image.fromarray(noise), compress_level=1))
    for side in (4000, 65535):
        file = bytearray(base64.b64decode(png(Image.new("RGB", (8, 8)))))
        file[16:24] = struct.pack(">II", side, side)
        file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
        files.append(base64.b64encode(file).decode())
    return tuple(files)


def of_image(file: str) -> dict[str, Any]:
    """The content part of an image in base64."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}


def body_of(file: str) -> bytes:
    """The body of a request about an image in base64."""
    message = {"role": "user", "content": [of_image(file)]}
    return json.dumps({"model": "m", "messages": [message], "max_tokens": 1}).encode()


def first_token_s(url: str, image: dict[str, Any], end: float) -> float:
    """Seconds from a request about an image to its first token."""
    start = time.perf_counter()
    with closing(_times(url, [image, {"type": "text", "text": QUESTION}], 4, end)) as times:
        return next(times)[0] - start


def longest_gap_s(engine: Engine, calls: Sequence[Callable[[], Any]], end: float) -> float:
    """The longest time between two tokens of an answer, while calls run at the same time."""
    content = [{"type": "text", "text": f"Count. {time.time()}"}]
    with ThreadPoolExecutor(max(len(calls), 1)) as threads:
        asked: list[Future[Any]] = []
        with closing(_times(engine.url, content, MAX_TOKENS, end, engine.tokens)) as stream:
            times = []
            for moment in stream:
                times.append(moment)
                if len(times) == TOKENS_AROUND:
                    asked = [threads.submit(call) for call in calls]
                if len(times) > TOKENS_AROUND and all(one.done() for one in asked):
                    break
            times += [moment for _, moment in zip(range(TOKENS_AROUND), stream, strict=False)]
        for one in asked:
            one.result()
    if len(times) < 2 * TOKENS_AROUND:
        raise RuntimeError(f"an answer ended after {len(times)} events, before the images")
    gaps = [(later - earlier, own - before) for (earlier, before), (later, own) in pairwise(times)]
    longest = max(gap - waited for gap, waited in gaps)
    print(f"  without the time for which this program waited for a processor: {longest:.3f} s")
    return max(gap for gap, _ in gaps)


def now() -> tuple[float, float]:
    """The time, and the seconds for which this thread has been ready and had no processor, where Linux
    says so: both of the same moment."""
    while True:
        before, moment, waited = waited_s(), time.perf_counter(), waited_s()
        if waited - before < 0.001:
            return moment, waited


def waited_s() -> float:
    """See :func:`now`."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _times(
    url: str, content: list[dict[str, Any]], count: int, end: float, tokens: Sequence[int] = ()
) -> Generator[tuple[float, float], None, None]:
    """The moments, see :func:`now`, at which events of an answer come that have text.

    Raises:
        RuntimeError: the server refuses the request, or does not answer in time.
    """
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    if tokens:
        body["allowed_token_ids"] = tokens
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT_S
    ) as response:
        if response.status_code != 200:
            raise RuntimeError(response.read().decode()[:2000])
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0]["delta"].get("content"):
                    yield now()
            if time.monotonic() > end:
                raise RuntimeError("the time is over (--seconds)")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=210, help="start no round behind this time"
    )
    parser.add_argument("--small", action="store_true", help="six layers each, to try it")
    parser.add_argument("--large", action="store_true", help="a tower that reads all pixels")
    parser.add_argument("--peers-dir", default="~/.cache/radixrt/peers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
