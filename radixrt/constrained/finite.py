"""Finds the rules of a grammar, or the parts of a schema, that have no finite sentence (in the
literature: unproductive symbols)."""

import collections
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)

Needs = Sequence[Collection[Symbol]]
"""What a sentence of a symbol needs: of each group one member's. A terminal has no groups."""


def endless_symbols(
    starts: Iterable[Symbol], needs: Callable[[Symbol], Needs[Symbol]]
) -> list[Symbol]:
    """The symbols that can be reached from these and have no finite sentence. ``needs`` is asked
    once for each symbol.

    The time is linear in the size of the grammar.

    >>> endless_symbols(["a"], {"a": [["b", "c"]], "b": [["b"]], "c": []}.__getitem__)
    ['b']
    """
    groups: dict[Symbol, Needs[Symbol]] = {}
    holders: dict[Symbol, list[tuple[Symbol, int]]] = collections.defaultdict(list)
    waiting = list(starts)
    while waiting:
        symbol = waiting.pop()
        if symbol in groups:
            continue
        groups[symbol] = needs(symbol)
        for index, group in enumerate(groups[symbol]):
            for member in group:
                holders[member].append((symbol, index))
                waiting.append(member)
    unmet = {symbol: set(range(len(found))) for symbol, found in groups.items()}
    finite = [symbol for symbol, indices in unmet.items() if not indices]
    for symbol in finite:  # grows while it is walked
        for holder, index in holders[symbol]:
            if index in unmet[holder]:
                unmet[holder].discard(index)
                if not unmet[holder]:
                    finite.append(holder)
    return [symbol for symbol, indices in unmet.items() if indices]


def cause_of(endless: Collection[Symbol], needs: Callable[[Symbol], Needs[Symbol]]) -> Symbol:
    """One of the endless symbols that needs itself: the others may be endless because of it.

    >>> needs = {"a": [["b"]], "b": [["b"]]}
    >>> cause_of(["a", "b"], needs.__getitem__)
    'b'
    """
    left = set(endless)
    symbol = next(iter(endless))
    seen: set[Symbol] = set()
    while symbol not in seen:
        seen.add(symbol)
        unmet = next((group for group in needs(symbol) if left.issuperset(group)), ())
        symbol = next(iter(unmet), symbol)
    return symbol
