"""The checks of a GGUF file against llama.cpp, and against float32 on its dequantized weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.gguf_oracle.llama_cpp import MAX_DROP, LlamaCpp, Server
from bench.quantization import logits
from radixrt.layers.kernels.choice import layer_kernels
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model


class Tokens(NamedTuple):
    """Texts and the first of those that have other tokens."""

    texts: int
    others: list[str]


class Greedy(NamedTuple):
    """Greedy tokens along llama.cpp's answers."""

    tokens: int
    agreed: int
    worst_margin: float
    """The greatest difference between our greatest logit and that of llama.cpp's token, where they disagree."""


class Divergence(NamedTuple):
    """Mean Kullback-Leibler divergence of next-token distributions from the reference, in nats, its standard error, and the share of
    positions whose likeliest token is the reference's."""

    positions: int
    ours: float
    llama_cpp: float
    ours_error: float
    llama_cpp_error: float
    ours_agrees: float
    llama_cpp_agrees: float


def served(folder: Path) -> CausalLM:
    """The model with the kernels and the dtype that a server would choose."""
    return load_model(folder, kernels=layer_kernels(torch.device("cpu")))


def compare_tokens(server: Server, folder: Path, texts: Sequence[str]) -> Tokens:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = (encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False))
    pairs = zip(texts, ours, strict=True)
    return Tokens(len(texts), [text for text, ids in pairs if server.tokens(text) != ids])


def compare_greedy(
    server: Server, model: CausalLM, prompts: Sequence[list[int]], count: int
) -> Greedy:
    """Our greedy token after each part of llama.cpp's answer, of ``count`` tokens, to each prompt."""
    tokens = agreed = 0
    worst = 0.0
    for prompt in prompts:
        answer = server.greedy(prompt, count)
        rows = logits(model, prompt + answer)[len(prompt) - 1 : -1].float()
        theirs = rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        margins = rows.max(1).values - theirs
        tokens += len(answer)
        agreed += int((margins == 0).sum())
        worst = max([worst, *margins.tolist()])
    return Greedy(tokens, agreed, worst)


def compare_divergence(
    llama: LlamaCpp, file: Path, model: CausalLM, reference: torch.nn.Module, bos: int | None, text: Path, pages: int,
    length: int = 512,
) -> Divergence:  # fmt: skip
    """Divergences over the second half of each page of a text.

    Log-probabilities that llama.cpp does not write are cut off for all three in the same way, and the rest is normalized again.

    Args:
        reference: a model of transformers in float32.
        bos: put over the first token of each page, as llama.cpp does; None: the model has none.
        length: tokens of a page.
    """
    theirs = llama.log_probabilities(file, text, length, pages)
    found: list[tuple[Tensor, ...]] = []
    for page, tokens in enumerate(theirs.tokens.tolist()):
        if bos is not None:
            tokens[0] = bos
        # of the tokens after positions length // 2 ... length - 2
        exact = reference(torch.tensor([tokens])).logits[0, length // 2 : -1]
        base = _cut_off(exact)
        both = (
            _cut_off(logits(model, tokens)[length // 2 : -1]),
            _cut_off(torch.from_numpy(theirs.log_probabilities(page, exact.shape[1]))),
        )
        likeliest = base.argmax(-1)
        found.append(
            (
                *(_divergence(base, rows) for rows in both),
                *((rows.argmax(-1) == likeliest).float() for rows in both),
            )
        )
    ours, other, *agree = (torch.cat(column) for column in zip(*found, strict=True))
    error = len(ours) ** -0.5
    return Divergence(
        len(ours),
        float(ours.mean()),
        float(other.mean()),
        float(ours.std()) * error,
        float(other.std()) * error,
        *(float(column.mean()) for column in agree),
    )


def _cut_off(rows: Tensor) -> Tensor:
    """Log-probabilities without differences greater than ``MAX_DROP``."""
    rows = rows.float()
    return torch.maximum(rows, rows.max(-1, keepdim=True).values - MAX_DROP).log_softmax(-1)


def _divergence(base: Tensor, other: Tensor) -> Tensor:
    return (base.exp() * (base - other)).sum(-1)
