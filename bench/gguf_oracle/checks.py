"""The checks of a GGUF file against llama.cpp, and against float32 on its dequantized weights."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.gguf_oracle.llama_cpp import MAX_DROP, LlamaCpp, Server
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.choice import layer_kernels
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from tests.models.harness import Harness
from tests.models.harness import Sequence as Cached

PAGE_SIZE = 16
"""Tokens of a page of the KV cache."""
PART = 10
"""Pages whose log-probabilities llama.cpp writes at a time: 1.3 GB with 262,144 tokens."""


class Tokens(NamedTuple):
    """Texts and the first of those that have other tokens."""

    texts: int
    others: list[str]


@dataclass
class Greedy:
    """Greedy tokens along llama.cpp's answers: llama.cpp's, ours and float32's."""

    tokens: int = 0
    agreed: int = 0
    """llama.cpp's tokens that are ours."""
    worst_margin: float = 0.0
    """The greatest lead of our likeliest token over llama.cpp's, where they disagree."""
    theirs_exact: int = 0
    """llama.cpp's tokens that are float32's."""
    ours_exact: int = 0
    """Our tokens that are float32's."""
    all_agreed: int = 0

    def add(self, answer: Tensor, ours: Tensor, exact: Tensor) -> None:
        """llama.cpp's tokens [tokens], our logits and float32's [tokens, vocabulary]."""
        margins = _below_greatest(ours, answer)
        theirs_exact = _below_greatest(exact, answer) == 0
        self.tokens += len(answer)
        self.agreed += int((margins == 0).sum())
        self.worst_margin = max([self.worst_margin, *margins.tolist()])
        self.theirs_exact += int(theirs_exact.sum())
        self.ours_exact += int((_below_greatest(ours, exact.argmax(-1)) == 0).sum())
        self.all_agreed += int((theirs_exact & (margins == 0)).sum())

    @property
    def share(self) -> float:
        """Share of llama.cpp's tokens that are ours."""
        return self.agreed / self.tokens

    def __str__(self) -> str:
        return (
            f"{self.agreed} of {self.tokens} ({self.share:.4f}); greatest margin of another one {self.worst_margin:.3f}; "
            f"float32's token is that of llama.cpp {self.theirs_exact} times ({self.theirs_exact / self.tokens:.4f}), "
            f"ours {self.ours_exact} ({self.ours_exact / self.tokens:.4f}), both {self.all_agreed}"
        )


class Divergence:
    """Kullback-Leibler divergence of next-token distributions, in nats, page by page."""

    def __init__(self) -> None:
        self._pages: list[Tensor] = []
        self._agreed: list[Tensor] = []

    def add(self, base: Tensor, other: Tensor) -> None:
        """Log-probabilities of a page [positions, vocabulary], first the reference's."""
        self._pages.append(_divergence(base, other))
        self._agreed.append((base.argmax(-1) == other.argmax(-1)).double())

    @property
    def mean(self) -> float:
        return float(torch.cat(self._pages).mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, by the spread of the pages' means; NaN of a single page."""
        means = [float(page.mean()) for page in self._pages]
        return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    def __str__(self) -> str:
        agreed = torch.cat(self._agreed)
        return (
            f"{self.mean:.6f} ± {self.standard_error:.6f} over {len(agreed)} tokens of {len(self._pages)} pages, "
            f"same likeliest token {agreed.mean():.4f}"
        )


class KVCacheDivergences(NamedTuple):
    """Divergences, with a KV cache in int8 and a plain one, from float32 with a plain one."""

    exact_int8: Divergence
    served: Divergence
    served_int8: Divergence


class Page(NamedTuple):
    """A page of a text, as llama-perplexity divides it."""

    start: int
    """Characters of the text before the page."""
    tokens: list[int]
    """The first is the model's beginning-of-sequence token, if it has one, in place of the
    text's."""


def served(folder: Path) -> CausalLM:
    """The model with the kernels and the dtype that a server would choose."""
    return load_model(folder, kernels=layer_kernels(torch.device("cpu")))


def logits(
    model: CausalLM,
    text: list[int],
    rows: Tensor | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """The logits behind each token of a text, or behind some [rows, vocabulary], without an
    engine."""
    run = Harness(model, PAGE_SIZE, num_pages=len(text) // PAGE_SIZE + 1, kv_dtype=kv_dtype)
    return model.logits(run.hidden([(Cached(), text)], rows))


def compare_tokens(server: Server, folder: Path, texts: Sequence[str]) -> Tokens:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = (encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False))
    pairs = zip(texts, ours, strict=True)
    return Tokens(len(texts), [text for text, ids in pairs if server.tokens(text) != ids])


def compare_greedy(
    server: Server, model: CausalLM, reference: torch.nn.Module, prompts: Sequence[list[int]], count: int,
) -> Greedy:  # fmt: skip
    """Our greedy token, and float32's, after each part of llama.cpp's answer, of ``count`` tokens,
    to each prompt.

    Args:
        reference: a model of transformers in float32.
    """
    greedy = Greedy()
    for prompt in prompts:
        answer = server.greedy(prompt, count)
        tokens = prompt + answer
        ours = logits(model, tokens)[len(prompt) - 1 : -1].float()
        exact = reference(torch.tensor([tokens]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        greedy.add(torch.tensor(answer), ours, exact)
    return greedy


def divide(tokenizer: Tokenizer, text: str, count: int, length: int = 512) -> list[Page]:
    """The first pages of a text, at most ``count``. As llama-perplexity needs it, a whole page
    follows the last one.

    Raises:
        ConfigError: the text is shorter than two pages.
    """
    encoded = tokenizer.encode(text)
    bos = tokenizer.encode("").ids[:1]
    count = min(count, len(encoded.ids) // length - 1)
    if count < 1:
        raise ConfigError(f"The text has fewer than {2 * length} tokens.")
    starts = range(0, count * length, length)
    return [
        Page(
            encoded.offsets[start + len(bos)][0],
            bos + encoded.ids[start + len(bos) : start + length],
        )
        for start in starts
    ]


def compare_divergence(
    llama: LlamaCpp, file: Path, model: CausalLM, reference: torch.nn.Module, text: str, pages: Sequence[Page], folder: Path,
) -> Iterator[tuple[Divergence, Divergence]]:  # fmt: skip
    """Our divergence and llama.cpp's so far, after every ten pages, over the second half of each
    page.

    Log-probabilities that llama.cpp does not write are cut off for all three in the same way, and
    the rest is normalized again.

    Args:
        reference: a model of transformers in float32.
        text: that was divided into ``pages``.
        folder: gets llama.cpp's log-probabilities.
    """
    ours, other = Divergence(), Divergence()
    for begin in range(0, len(pages), PART):
        part = pages[begin : begin + PART]
        (part_file := folder / "pages.txt").write_text(text[part[0].start :])
        theirs = llama.log_probabilities(file, part_file, len(part[0].tokens), len(part))
        for page, (_, tokens) in enumerate(part):
            tokens = tokens[:1] + theirs.tokens[page, 1:].tolist()
            rows = _second_half(tokens)
            exact = reference(torch.tensor([tokens]), logits_to_keep=rows).logits[0]
            base = _cut_off(exact)
            ours.add(base, _cut_off(logits(model, tokens, rows)))
            found = torch.from_numpy(theirs.log_probabilities(page, exact.shape[1]))
            other.add(base, _cut_off(found))
        yield ours, other


def compare_kv_cache(
    exact: CausalLM, model: CausalLM, pages: Sequence[Page]
) -> Iterator[KVCacheDivergences]:
    """Divergences from ``exact`` so far, after every page, over the second half of each.

    Args:
        exact: in float32 without rounded activations, so that only its KV cache makes a difference.
        model: as it is served. Any change of its numbers lets other activations be rounded up, so
            two runs of it differ by more than the cache.
    """
    found = KVCacheDivergences(Divergence(), Divergence(), Divergence())
    for _, tokens in pages:
        rows = _second_half(tokens)
        base, *others = (
            logits(of, tokens, rows, dtype).float().log_softmax(-1)
            for of, dtype in (
                (exact, None),
                (exact, torch.int8),
                (model, None),
                (model, torch.int8),
            )
        )
        for divergence, other in zip(found, others, strict=True):
            divergence.add(base, other)
        yield found


def _second_half(tokens: list[int]) -> Tensor:
    """Positions of a page whose next tokens llama.cpp predicts."""
    return torch.arange(len(tokens) // 2, len(tokens) - 1)


def _cut_off(rows: Tensor) -> Tensor:
    """Log-probabilities without differences greater than ``MAX_DROP``."""
    rows = rows.float()
    return torch.maximum(rows, rows.max(-1, keepdim=True).values - MAX_DROP).log_softmax(-1)


def _divergence(base: Tensor, other: Tensor) -> Tensor:
    return (base.exp() * (base - other)).sum(-1)


def _below_greatest(rows: Tensor, tokens: Tensor) -> Tensor:
    """Differences between the greatest logit of each row [rows, vocabulary] and that of a token
    [rows]."""
    return rows.max(-1).values - rows.gather(-1, tokens[:, None])[:, 0]
