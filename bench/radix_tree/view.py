"""CPU time of the web page's view of a large radix tree: ``python -m bench.radix_tree.view``.

A stream of readings (``/v1/live``) asks for one view a second. This times what the processes do for it: the scheduler's
search, the messages between the processes, the tokenizer process's texts, the api's JSON. 10 ms are 1 % of a core.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

import radixrt
from bench.radix_tree.shapes import SHAPES
from radixrt.base.config import ServerConfig
from radixrt.messages.cache_tree import CacheTree
from radixrt.messages.calls import CacheTreeCall
from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.radix.tree import RadixTree
from radixrt.scheduler.radix.view import TreeView
from radixrt.tokenizer.calls import with_texts
from radixrt.tokenizer.vocabulary import Vocabulary

PAGE_SIZE = 16
VIEW = CacheTreeCall(call_id=1, depth=16, children=100, most=600)
"""As the page asks for it."""
DEMO_MODEL = Path(radixrt.__file__).parent / "demo_model"
DEMO_TOKENS = 2000
"""Of its vocabulary, which stand for the tokens of the tree."""


def tree_of(shape: str, num_nodes: int) -> RadixTree:
    tree, next_page = RadixTree(PAGE_SIZE), 0
    for tokens in SHAPES[shape](num_nodes, PAGE_SIZE):
        num_pages = len(tokens) // PAGE_SIZE
        root = tree.lock_root()
        pages = np.arange(next_page, next_page + num_pages, dtype=np.int32)
        end, _ = tree.insert(root, tokens, pages)
        tree.move_lock(root, end)
        tree.unlock(end)
        next_page += num_pages
    return tree


def search(tree: RadixTree) -> CacheTree:
    slices = TreeView(tree, VIEW).slices()
    while True:
        try:
            next(slices)
        except StopIteration as end:
            view: CacheTree = end.value
            return view


def pass_on(view: CacheTree) -> Any:
    """The view as the api gets it, from the scheduler by way of the tokenizer process."""
    for _ in range(2):
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(view))
    return received


def cpu_ms(work: Callable[[], Any], rounds: int) -> float:
    """Median CPU time of this process."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.radix_tree.view", description=__doc__)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    vocabulary = Vocabulary.load(ServerConfig(model_path=str(DEMO_MODEL)))
    text_of = lru_cache(4096)(  # as the tokenizer process remembers them
        lambda packed: vocabulary.decode((unpack_ids(packed) % DEMO_TOKENS).tolist())
    )
    print("CPU milliseconds of one view, medians")
    print("shape                 nodes  shown  search  messages  texts   json    all")
    for shape in SHAPES:
        tree = tree_of(shape, arguments.nodes)
        view = search(tree)
        told = with_texts(pass_on(view), text_of, True)
        works = (
            partial(search, tree),
            partial(pass_on, view),
            lambda view=view: with_texts(
                msgspec.to_builtins(view, builtin_types=[bytes]), text_of, True
            ),
            partial(orjson.dumps, told),
        )
        parts = [cpu_ms(work, arguments.rounds) for work in works]
        shown = str(told).count("'text':")
        print(f"{shape:16}{tree.num_nodes:11,}{shown:7}", end="")
        print("{:8.1f}{:10.1f}{:7.1f}{:7.1f}{:7.1f}".format(*parts, sum(parts)))


if __name__ == "__main__":
    main()
