"""What do the prefixes in the radix tree say? The scheduler's view of it, with text in place of token ids."""

from typing import Any

from radixrt.messages import CacheNamespace, CacheTree, CacheTreeNode, num_ids, unpack_ids
from radixrt.tokenizer.vocabulary import Vocabulary


def described(tree: CacheTree, vocabulary: Vocabulary, show_texts: bool) -> dict[str, Any]:
    """The tree as builtins; each node has the ``text`` of its first tokens, or None.

    Args:
        show_texts: else no text is told at all. That of salted namespaces never is: who looks need not know the salt.
    """
    return {
        "page_size": tree.page_size,
        "total_tokens": tree.total_tokens,
        "total_nodes": tree.total_nodes,
        "namespaces": [
            _namespace(namespace, vocabulary, show_texts) for namespace in tree.namespaces
        ],
    }


def num_shown_tokens(tree: CacheTree) -> int:
    """How many tokens there are to decode."""
    nodes = [node for namespace in tree.namespaces for node in namespace.children]
    count = 0
    while nodes:
        node = nodes.pop()
        count += num_ids(node.first_token_ids)
        nodes += node.children
    return count


def _namespace(
    namespace: CacheNamespace, vocabulary: Vocabulary, show_texts: bool
) -> dict[str, Any]:
    show_texts = show_texts and not namespace.salted
    return {
        "salted": namespace.salted,
        "total_tokens": namespace.total_tokens,
        "total_nodes": namespace.total_nodes,
        "children": [_node(child, vocabulary, show_texts) for child in namespace.children],
    }


def _node(node: CacheTreeNode, vocabulary: Vocabulary, show_texts: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: getattr(node, name)
        for name in node.__struct_fields__
        if name not in ("first_token_ids", "children")
    }
    text = vocabulary.decode(unpack_ids(node.first_token_ids).tolist()) if show_texts else None
    children = [_node(child, vocabulary, show_texts) for child in node.children]
    return {"text": text, **fields, "children": children}
