"""Merges the replies of several replicas to one call, as builtins.

The ids of nodes, which a replica gives to the nodes of its tree, are multiplied by the number of
replicas, plus the number of the replica, so a node names its owner.
"""

from typing import Any

Value = Any
"""The value of a reply, as builtins."""


def added(values: list[Value]) -> Value:
    """Equal structures with their numbers added. Lists of bounds stay as they are.

    >>> added([{"steps": 1, "time": {"bounds": [0.5], "counts": [1, 0]}}, {"steps": 2, "time": {"bounds": [0.5], "counts": [3, 4]}}])
    {'steps': 3, 'time': {'bounds': [0.5], 'counts': [4, 4]}}
    """
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {
            key: first[key]
            if key == "bounds"
            else added([value[key] for value in values if key in value])
            for key in keys
        }
    if isinstance(first, list):
        return [added(list(items)) for items in zip(*values, strict=True)]
    return sum(values)


def merged_tenant_stats(values: list[Value]) -> Value:
    """One :class:`radixrt.messages.stats.TenantStats` of those of several replicas."""
    total = added(values)
    rate = total["cached_tokens"] / max(1, total["prompt_tokens"])
    return total | {"page_size": values[0]["page_size"], "hit_rate": rate}


def merged_trees(trees: dict[int, Value], num_replicas: int) -> Value:
    """One :class:`radixrt.messages.cache_tree.CacheTree` of those of several replicas."""
    namespaces, above = [], []
    for replica, tree in trees.items():
        for node in _nodes(tree):
            node["node"] = node["node"] * num_replicas + replica
        namespaces += [namespace | {"replica": replica} for namespace in tree["namespaces"]]
        above += tree["above"]
    namespaces.sort(key=lambda namespace: -namespace["total_tokens"])
    return {
        "page_size": next(iter(trees.values()))["page_size"],
        "total_tokens": sum(tree["total_tokens"] for tree in trees.values()),
        "total_nodes": sum(tree["total_nodes"] for tree in trees.values()),
        "namespaces": namespaces,
        "above": above,
    }


def _nodes(tree: Value) -> list[Value]:
    found, pending = [], [*tree["above"]]
    for namespace in tree["namespaces"]:
        pending += namespace["children"]
    while pending:
        node = pending.pop()
        found.append(node)
        pending += node["children"]
    return found
