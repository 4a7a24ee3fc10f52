"""What do the prefixes in the radix tree say? The scheduler's view of it, with text in place of token ids."""

from collections.abc import Iterator
from typing import Any

from radixrt.messages.ids import num_ids, unpack_ids
from radixrt.tokenizer.vocabulary import Vocabulary

Tree = dict[str, Any]
"""A :class:`radixrt.messages.cache_tree.CacheTree` as builtins."""


def described(tree: Tree, vocabulary: Vocabulary, show_texts: bool) -> Tree:
    """The tree, changed in place: each node has the ``text`` of its first tokens, or None.

    Args:
        show_texts: else no text is told at all. That of salted namespaces never is: who looks need not know the salt.
    """
    for salted, node in _nodes(tree):
        ids = unpack_ids(node.pop("first_token_ids")).tolist()
        node["text"] = vocabulary.decode(ids) if show_texts and not salted else None
    return tree


def num_shown_tokens(tree: Tree) -> int:
    """How many tokens there are to decode."""
    return sum(num_ids(node["first_token_ids"]) for _, node in _nodes(tree))


def _nodes(tree: Tree) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Each node, and whether it is of a salted namespace."""
    for namespace in tree["namespaces"]:
        pending = list(namespace["children"])
        while pending:
            node = pending.pop()
            pending += node["children"]
            yield namespace["salted"], node
