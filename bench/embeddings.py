"""Measures a server's texts per second beside transformers on the same cores, interleaved.

    python -m bench.embeddings [--rounds 5] [--texts 512] [--lengths 8 128] [--dtype bfloat16]
    [--model-path DIR]

Without a path the model has MiniLM's shape (6 layers, 384 wide, vocabulary of 30,522) with random
weights. Both sides compute in one dtype and get the same token ids, of lengths spread evenly
between the bounds. transformers computes batches of ``--batch`` texts, sorted by length as
sentence-transformers sorts them, with mean pooling. The server gets requests of ``--batch`` texts
over HTTP, a few at a time, and answers in base64.
"""

import argparse
import asyncio
import base64
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.local_server import local_server
from bench.markdown import markdown, median_and_range
from tests.checkpoints import make_pooled

VOCAB_SIZE = 30522
AT_ONCE = 4
"""Requests in flight."""
MIN_COSINE = {"float32": 0.9999, "bfloat16": 0.999}
"""Least cosine of the two sides' vectors; in bfloat16 each side has rounding errors of its own."""

Vectors = NDArray[np.float32]  # [texts, size]


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(arguments.model_path) if arguments.model_path else minilm(Path(temp))
        rng = random.Random(0)
        low, high = arguments.lengths
        texts = [
            [rng.randrange(1000, VOCAB_SIZE) for _ in range(rng.randint(low, high))]
            for _ in range(arguments.texts)
        ]
        tokens = sum(map(len, texts))
        dtype = getattr(torch, arguments.dtype)
        model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()
        flags = ["--dtype", arguments.dtype, "--served-model-name", "m", "--log-level", "warning"]
        rates: dict[str, list[float]] = {"transformers": [], "radixrt": []}
        with local_server(str(folder), *flags) as url:
            for number in range(arguments.rounds + 1):  # the first warms both up
                began = time.perf_counter()
                theirs = by_transformers(model, texts, arguments.batch)
                middle = time.perf_counter()
                ours = asyncio.run(by_server(url, texts, arguments.batch))
                end = time.perf_counter()
                if number:
                    rates["transformers"].append(len(texts) / (middle - began))
                    rates["radixrt"].append(len(texts) / (end - middle))
        least = float((ours * theirs).sum(1).min())
        assert least >= MIN_COSINE[arguments.dtype], f"the vectors differ: cosine {least}"
    print(
        f"{arguments.dtype}: {len(texts)} texts of {low} to {high} tokens ({tokens} tokens); least cosine {least:.6f}"
    )
    ratios = [b / a for a, b in zip(rates["transformers"], rates["radixrt"], strict=True)]
    row = {f"{name}, texts/s": median_and_range(each) for name, each in rates.items()}
    print("\n".join(markdown([row | {"ratio": median_and_range(ratios, 2)}])))


def minilm(folder: Path) -> Path:
    """Save a random model of MiniLM's shape, with a tokenizer that only counts."""
    make_pooled(
        "bert",
        folder,
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@torch.inference_mode()
def by_transformers(model: Any, texts: list[list[int]], batch: int) -> Vectors:
    """Unit vectors: [texts, size]"""
    vectors = torch.empty(len(texts), model.config.hidden_size)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        ids = torch.zeros(len(some), len(texts[some[0]]), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(some):
            ids[row, : len(texts[index])] = torch.tensor(texts[index])
            mask[row, : len(texts[index])] = 1
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = (hidden.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        vectors[some] = torch.nn.functional.normalize(pooled)
    return vectors.numpy()


async def by_server(url: str, texts: list[list[int]], batch: int) -> Vectors:
    """As :func:`by_transformers`."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def embed(client: httpx.AsyncClient, some: list[list[int]]) -> list[Vectors]:
        async with limit:
            body = {"input": some, "encoding_format": "base64"}
            response = await client.post(f"{url}/v1/embeddings", json=body)
        data = response.raise_for_status().json()["data"]
        return [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data]

    gc.collect()
    async with httpx.AsyncClient(timeout=600) as client:
        parts = [texts[start : start + batch] for start in range(0, len(texts), batch)]
        found = await asyncio.gather(*(embed(client, part) for part in parts))
    return np.stack([vector for part in found for vector in part])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.embeddings", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--texts", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="texts of a batch, and of a request (default: %(default)s)")  # fmt: skip
    parser.add_argument("--lengths", type=int, nargs=2, default=(8, 128), metavar=("LOW", "HIGH"), help="tokens of a text (default: 8 128)")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")  # fmt: skip
    parser.add_argument("--model-path", help="folder of an encoder; its vectors must be means of length 1")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
