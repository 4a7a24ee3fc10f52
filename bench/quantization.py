"""Measures the effect of quantization: logits and greedy tokens of a checkpoint in int8 and int4, and with a KV cache in int8,
against the unquantized one.

    python -m bench.quantization [--model-path DIR] [--prompts 16] [--tokens 128]

Without a path it is the built-in model, which has been trained; the prompts are the license's text, or random
tokens where there is no tokenizer that knows text. Each model continues the plain one's greedy answer, so a token counts as
agreeing if it is the one that the plain model chose at the same place after the same text.
"""

import argparse
from pathlib import Path

import torch

from radixrt.base.config import DEMO_MODEL
from radixrt.layers.kernels.choice import layer_kernels
from radixrt.layers.weights import weight_bytes
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from tests.models.harness import Harness, Sequence

TEXT = Path(__file__).parent.parent / "LICENSE"  # it never changes, so runs years apart compare
PAGE_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default=DEMO_MODEL)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument(
        "--tokens", type=int, default=128, help="of each prompt, and of each answer"
    )
    arguments = parser.parse_args()
    folder = resolve_model_path(arguments.model_path)

    def load(quantization: str) -> CausalLM:
        return load_model(
            folder,
            quantization=quantization,
            load_format=arguments.load_format,
            kernels=layer_kernels(torch.device("cpu")),
        )

    plain = load("auto")
    prompts = read_prompts(folder, plain.vocab_size, arguments.prompts, arguments.tokens)
    answers = generate(plain, prompts, arguments.tokens)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    expected = [logits(plain, text)[arguments.tokens - 1 : -1] for text in texts]
    spread = torch.cat(expected).std()
    print(f"{folder.name}: logits have a standard deviation of {spread:.2f}")
    print(
        "| weights | MB | rms error | largest error | greedy tokens that agree |\n|---|---|---|---|---|"
    )
    print(f"| plain | {weight_bytes(plain) / 1e6:.1f} | | | |")
    for name, quantization, kv_dtype in (
        ("int8", "int8", None),
        ("int4", "int4", None),
        ("plain, KV cache in int8", "auto", torch.int8),
    ):
        model = load(quantization)
        found = [logits(model, text, kv_dtype)[arguments.tokens - 1 : -1] for text in texts]
        errors = torch.cat(found) - torch.cat(expected)
        same = torch.cat([row.argmax(-1) for row in found]) == torch.tensor(
            [token for answer in answers for token in answer]
        )
        print(
            f"| {name} | {weight_bytes(model) / 1e6:.1f} | {errors.square().mean().sqrt():.3f} | "
            f"{errors.abs().max():.2f} | {100 * same.double().mean():.1f} % of {len(same)} |",
            flush=True,
        )


def read_prompts(folder: Path, vocab_size: int, count: int, length: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids
    if max(ids) < vocab_size // 4:  # a tokenizer of bytes
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, vocab_size, (count, length), generator=generator).tolist()
    step = max(1, (len(ids) - length) // count)
    return [ids[i * step : i * step + length] for i in range(count)]


def harness(
    model: CausalLM, sequences: int, length: int, kv_dtype: torch.dtype | None = None
) -> Harness:
    pages = sequences * (length // PAGE_SIZE + 1)
    return Harness(model, PAGE_SIZE, num_pages=pages, kv_dtype=kv_dtype)


def generate(model: CausalLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    return harness(model, len(prompts), len(prompts[0]) + count).generate(prompts, count)


def logits(model: CausalLM, text: list[int], kv_dtype: torch.dtype | None = None) -> torch.Tensor:
    return harness(model, 1, len(text), kv_dtype).step([(Sequence(), text)])[0]


if __name__ == "__main__":
    with torch.inference_mode():
        main()
