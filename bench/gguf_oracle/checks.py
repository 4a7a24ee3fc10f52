"""The checks of a GGUF file against llama.cpp, and against float32 on its dequantized weights."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.gguf_oracle.llama_cpp import MAX_DROP, LlamaCpp, Server
from bench.quantization import harness, logits
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.choice import layer_kernels
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import load_model
from tests.models.harness import Sequence as Cached

PART = 10
"""Pages of which llama.cpp writes its log-probabilities at a time: 1.3 GB with a vocabulary of 262,144 tokens."""


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


class Divergence:
    """Kullback-Leibler divergence of next-token distributions from a reference's, in nats, page by page."""

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
        """Of the mean, by the spread of the pages' means; NaN of a single page."""
        means = [float(page.mean()) for page in self._pages]
        return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    def __str__(self) -> str:
        agreed = torch.cat(self._agreed)
        return (
            f"{self.mean:.6f} ± {self.standard_error:.6f} over {len(agreed)} tokens of {len(self._pages)} pages, "
            f"same likeliest token {agreed.mean():.4f}"
        )


class KVCacheDivergences(NamedTuple):
    """Of distributions with a KV cache in int8 and with a plain one, from float32 with a plain one."""

    exact_int8: Divergence
    served: Divergence
    served_int8: Divergence


class Page(NamedTuple):
    """A page of a text, as llama-perplexity divides it."""

    start: int
    """In characters of the text."""
    tokens: list[int]
    """The first is the model's beginning-of-sequence token, if it has one, in place of the text's."""


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


def divide(tokenizer: Tokenizer, text: str, count: int, length: int = 512) -> list[Page]:
    """The first pages of a text, at most ``count``. As llama-perplexity needs it, a whole page follows the last one.

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
    """Our divergence and llama.cpp's so far, after every ten pages, over the second half of each page.

    Log-probabilities that llama.cpp does not write are cut off for all three in the same way, and the rest is normalized again.

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
            ours.add(base, _cut_off(_logits(model, tokens, rows)))
            found = torch.from_numpy(theirs.log_probabilities(page, exact.shape[1]))
            other.add(base, _cut_off(found))
        yield ours, other


def compare_kv_cache(
    exact: CausalLM, model: CausalLM, pages: Sequence[Page]
) -> Iterator[KVCacheDivergences]:
    """Divergences from ``exact`` so far, after every page, over the second half of each.

    Args:
        exact: in float32 without rounded activations, so that only its KV cache makes a difference.
        model: as it is served. Any change of its numbers lets other activations be rounded up, so two runs of it
            differ by more than the cache.
    """
    found = KVCacheDivergences(Divergence(), Divergence(), Divergence())
    for _, tokens in pages:
        rows = _second_half(tokens)
        base, *others = (
            _logits(of, tokens, rows, dtype).float().log_softmax(-1)
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


def _logits(
    model: CausalLM, tokens: list[int], rows: Tensor, kv_dtype: torch.dtype | None = None
) -> Tensor:
    """Of these positions [positions, vocabulary]."""
    run = harness(model, 1, len(tokens), kv_dtype)
    return model.logits(run.hidden([(Cached(), tokens)], rows))


def _cut_off(rows: Tensor) -> Tensor:
    """Log-probabilities without differences greater than ``MAX_DROP``."""
    rows = rows.float()
    return torch.maximum(rows, rows.max(-1, keepdim=True).values - MAX_DROP).log_softmax(-1)


def _divergence(base: Tensor, other: Tensor) -> Tensor:
    return (base.exp() * (base - other)).sum(-1)
