"""Takes the pages that a dead scheduler has left in a shared pool into the radix tree."""

import numpy as np

from radixrt.scheduler.radix.page_allocator import NO_PAGES, Pages
from radixrt.scheduler.radix.pool_record import PoolRecord
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.radix.tree import RadixTree


def take_over(record: PoolRecord, tree: RadixTree, states: KeptStates) -> Pages:
    """Insert the recorded prefixes into the tree, which is empty and is recorded from now on;
    returns the pages that it has: [n].

    Of pages that hold the same prefix, the tree gets the first. The states behind the others belong
    to it, if it has none; what continues the others continues it. At each moment the record is one
    that the next scheduler could use, should this one die too.
    """
    tree.observers += (record,)
    taken = [NO_PAGES]
    for root, tokens, pages, rows in record.take_prefixes():
        start = tree.lock_root(root)
        end, existing = tree.insert(start, tokens, pages)
        known = end.prefix_pages()
        for index in np.flatnonzero((known != pages) & (rows >= 0)).tolist():
            if not states.has(int(known[index])):
                record.state_moved(int(pages[index]), int(known[index]))
        states.adopt(known, rows, tree.page_size)
        tree.move_lock(start, end)
        tree.unlock(end)
        taken.append(pages[existing:])
    record.keep_only(np.concatenate(taken))
    return np.concatenate(taken)
