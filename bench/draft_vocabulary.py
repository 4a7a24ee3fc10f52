"""Measures what the frequent tokens of an MTP layer's drafts save and cost.

    python -m bench.draft_vocabulary coverage TOKENIZER_JSON TEXT...
    python -m bench.draft_vocabulary cost [--vocabulary 248320] [--hidden 2560] [--rows 1 4 16]

``coverage``: the share of the tokens of texts that can be drafted: those with the lowest ids, and
those that texts under the same cache root have had last. What is not covered cannot be accepted.
Tokens are counted in the second half of the texts; the first stands for what a root has had before.

``cost``: the CPU time of the LM head's product with all tokens, and with the copied rows, by
interleaved rounds, and of the rows that a draft copies of tokens it has met; weights are random.
"""

import argparse
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer

from radixrt.layers.kernels.choice import layer_kernels
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.linear import VocabParallelEmbedding, pack_matrices
from radixrt.layers.matrix import DenseMatrix
from radixrt.layers.parallel import TensorParallel
from radixrt.models.draft_vocabulary import PIECE, CopiedRows
from radixrt.models.head_files import FREQUENT_IDS
from radixrt.worker.drafts.own_tokens import MAX_OWN, MAX_READ, OwnTokens
from radixrt_kernels import native

ROUNDS = 9


def coverage(tokenizer: Tokenizer, texts: list[str]) -> Iterator[str]:
    """A line for each number of lowest ids."""
    token_ids = [token for one in tokenizer.encode_batch(texts) for token in one.ids]
    middle = len(token_ids) // 2
    yield f"{len(token_ids)} tokens of a vocabulary of {tokenizer.get_vocab_size()}"
    for count in (FREQUENT_IDS // 4, FREQUENT_IDS // 2, FREQUENT_IDS, 2 * FREQUENT_IDS):
        known: OrderedDict[int, None] = OrderedDict()
        low = met = 0
        for place, token in enumerate(token_ids):
            if token < count:
                low += place >= middle
                continue
            met += token in known and place >= middle
            known[token] = None
            known.move_to_end(token)
            if len(known) > MAX_OWN:
                known.popitem(last=False)
        tokens = len(token_ids) - middle
        yield f"{count:6} lowest ids: {low / tokens:.4f}, with those met {(low + met) / tokens:.4f}"


def cost(vocabulary: int, hidden: int, rows: list[int]) -> Iterator[str]:
    """A line for each number of rows."""
    torch.set_default_dtype(torch.bfloat16)
    kernels = layer_kernels(torch.device("cpu"))
    whole, plain = (_random_head(count, hidden, kernels) for count in (vocabulary, FREQUENT_IDS))
    model: Any = SimpleNamespace(output_head=whole, scaled=lambda x: x, dtype=torch.bfloat16)
    begun = time.process_time()
    frequent = CopiedRows(model, FREQUENT_IDS, kernels)
    frequent.copy(torch.arange(FREQUENT_IDS), torch.arange(FREQUENT_IDS))
    isa = "torch" if native is None else native.isa()
    yield f"{isa}: {FREQUENT_IDS} rows copied in {time.process_time() - begun:.2f} CPU seconds"
    own = OwnTokens(FREQUENT_IDS, CopiedRows(model, PIECE, kernels).another)
    own.note(range(FREQUENT_IDS, FREQUENT_IDS + MAX_OWN))
    reads = [1e3 * _cpu_s(lambda: own.read(MAX_READ)) for _ in range(MAX_OWN // MAX_READ)]
    yield (
        f"{MAX_READ} rows of a root copied in {statistics.median(reads):.1f} ms, at most {max(reads):.1f} ms"
    )
    for count in rows:
        states = torch.randn(count, hidden)
        every: list[list[float]] = [[], [], [], []]
        for _ in range(ROUNDS):
            products = (whole.logits, plain.logits, frequent.logits, own.scores)
            for seen, product in zip(every, products, strict=True):
                seen.append(_cpu_s(lambda product=product, states=states: product(states)))  # type: ignore[misc]
        all_s, plain_s, copy_s, own_s = (statistics.median(seen) for seen in every)
        yield (
            f"{count:3} rows: all {1e3 * all_s:.1f} ms, frequent in bfloat16 {1e3 * plain_s:.1f} ms "
            f"({plain_s / all_s:.3f}), in 8 bits {1e3 * copy_s:.1f} ms ({copy_s / all_s:.3f}), {MAX_OWN} of a root {1e3 * own_s:.1f} ms"
        )


def _random_head(rows: int, columns: int, kernels: LayerKernels) -> VocabParallelEmbedding:
    head = VocabParallelEmbedding(rows, columns, TensorParallel())
    head.allocate(DenseMatrix)
    matrix: Any = head.loadable
    matrix.weight.data.normal_(std=0.02)
    pack_matrices(head, kernels)
    return head


def _cpu_s(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    covered = parts.add_parser("coverage")
    covered.add_argument("tokenizer")
    covered.add_argument("texts", nargs="+")
    taken = parts.add_parser("cost")
    taken.add_argument("--vocabulary", type=int, default=248_320)
    taken.add_argument("--hidden", type=int, default=2560)
    taken.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    if arguments.part == "coverage":
        texts = [Path(file).read_text(errors="ignore") for file in arguments.texts]
        lines = coverage(Tokenizer.from_file(arguments.tokenizer), texts)
    else:
        lines = cost(arguments.vocabulary, arguments.hidden, arguments.rows)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
