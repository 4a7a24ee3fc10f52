"""The continuation of a prefix is what the sequence used last went on with, as a list of all
sequences tells."""

import random

import numpy as np

from radixrt.messages.cache_root import CacheRoot
from radixrt.scheduler.radix.divergence import continuation
from radixrt.scheduler.radix.node import SequenceEnd
from radixrt.scheduler.radix.tree import RadixTree

PAGE_SIZE = 2


def use(tree: RadixTree, tokens: list[int], next_page: int, salt: str = "") -> int:
    """Insert a sequence, as one that ends does; returns the next free page."""
    root = tree.lock_root(CacheRoot(salt=salt))
    count = len(tokens) // PAGE_SIZE
    whole = np.array(tokens[: count * PAGE_SIZE], np.int32)
    end, _ = tree.insert(root, whole, np.arange(next_page, next_page + count, dtype=np.int32))
    tree.move_lock(root, end)
    tree.unlock(end)
    return next_page + count


def ask(tree: RadixTree, prompt: list[int], limit: int, salt: str = "") -> list[int]:
    tokens = np.array(prompt, np.int32)
    match = tree.match(tokens[:-1], CacheRoot(salt=salt))
    if match is None:
        return []
    return continuation(tree, match, tokens[match.num_pages * PAGE_SIZE :], limit).tolist()


def expected(used: list[list[int]], prompt: list[int], limit: int) -> list[int]:
    """Page by page: of the sequences that begin like this and go on, the one used last."""
    text = prompt
    while len(text) < len(prompt) + limit:
        end = len(text) // PAGE_SIZE * PAGE_SIZE + PAGE_SIZE
        longer = [one for one in used if one[: len(text)] == text and len(one) >= end]
        if not longer:
            break
        text = longer[-1][:end]
    return text[len(prompt) : len(prompt) + limit]


def test_it_is_the_branch_used_last() -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(60):
        tree, used, page = RadixTree(PAGE_SIZE), [], 0
        for _ in range(30):
            stem = rng.choice(used) if used and rng.random() < 0.7 else []
            tokens = stem[: rng.randint(0, len(stem))] + [
                rng.randrange(3) for _ in range(rng.randint(1, 9))
            ]
            page = use(tree, tokens, page)
            used.append(tokens[: len(tokens) // PAGE_SIZE * PAGE_SIZE])
            known = rng.choice(used)
            prompt = known[: rng.randint(0, len(known))] or [0]
            limit = rng.randint(1, 8)
            answer = ask(tree, prompt, limit)
            assert answer == expected(used, prompt, limit), (used, prompt, limit)
            found += bool(answer)
    assert found > 500


def test_the_tokens_behind_the_last_page_belong_to_it() -> None:
    tree = RadixTree(PAGE_SIZE)
    use(tree, [1, 2, 3, 4], 0)
    match = tree.match(np.array([1, 2, 3, 4], np.int32))
    assert match is not None
    match.node.end = SequenceEnd(0, "", np.array([5], np.int32).tobytes())
    assert ask(tree, [1, 2, 3], 8) == [4, 5]
    assert ask(tree, [1, 2, 3, 4], 8) == [5]
    assert ask(tree, [1, 2, 3, 4, 5], 8) == []


def test_another_salt_knows_nothing() -> None:
    tree = RadixTree(PAGE_SIZE)
    use(tree, [1, 2, 3, 4], 0, salt="a")
    use(tree, [1, 2, 7, 8], 2, salt="b")
    assert ask(tree, [1, 2], 8, "a") == [3, 4]
    assert ask(tree, [1, 2], 8, "b") == [7, 8]
    assert ask(tree, [1, 2], 8, "c") == []
    assert ask(tree, [1, 2], 8) == []


def test_a_prompt_that_departs_from_the_tree_has_no_continuation() -> None:
    tree = RadixTree(PAGE_SIZE)
    use(tree, [1, 2, 3, 4, 5, 6], 0)
    assert ask(tree, [1, 2, 9], 8) == []
    assert ask(tree, [1, 2, 3, 9], 8) == []
    assert ask(tree, [1, 2, 3], 2) == [4, 5]
