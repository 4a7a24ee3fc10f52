"""Gives the pages of the KV pool to sequences and takes them back.

Every page is free, in the radix tree, or owned by exactly one running sequence. Freed pages may be
allocated again in the very next plan although a step in flight still writes to them: steps run in
order, so the new owner writes later.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds, pack_ids, unpack_ids
from radixrt.messages.requests import NO_TENANT, RequestOptions, Tenant
from radixrt.messages.steps import SAME_STATE, DraftSources
from radixrt.scheduler.disk.pages import DiskPages
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.radix.divergence import cache_facts, continuation, turn_before
from radixrt.scheduler.radix.eviction import eviction_rule, make_policy
from radixrt.scheduler.radix.ghosts import GHOSTS_A_PAGE, MAX_GHOSTS
from radixrt.scheduler.radix.key_ids import tokens_of
from radixrt.scheduler.radix.leases import Lease, Leases
from radixrt.scheduler.radix.node import Match, Node, SequenceEnd
from radixrt.scheduler.radix.page_allocator import NO_PAGES, PageAllocator, Pages
from radixrt.scheduler.radix.pool_record import PoolRecord
from radixrt.scheduler.radix.prefix_watch import MissingPage, PrefixWatch
from radixrt.scheduler.radix.request_hints import Sessions, apply_hints
from radixrt.scheduler.radix.state_orders import StateOrders
from radixrt.scheduler.radix.states import KeptStates
from radixrt.scheduler.radix.takeover import take_over
from radixrt.scheduler.radix.tree import RadixTree
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable

MAX_CONTINUED = 2048
"""Tokens of a continuation that go to the worker."""

NO_TOKENS = unpack_ids(b"")


class KVCache:
    """Page allocator and radix tree, behind the operations of a sequence's life."""

    def __init__(
        self,
        limits: SchedulerLimits,
        slots: SlotTable,
        clock: Callable[[], float],
        disk: DiskPages | None = None,
    ) -> None:
        num_pages, self.page_size = limits.num_pages, limits.page_size
        self.allocator = PageAllocator(num_pages)
        self._policy_name = limits.settings.eviction_policy
        self.policy = make_policy(self._policy_name, clock)
        most_ghosts = min(MAX_GHOSTS, GHOSTS_A_PAGE * num_pages)
        self.tree = RadixTree(self.page_size, self.policy, clock, most_ghosts)
        self.disk = disk
        """The pages on disk; None: there are none, and nothing below asks for them."""
        if disk is not None:
            self.tree.observers = (disk.names,)
        self.record: PoolRecord | None = None
        """The record of a shared pool; None: the pool ends with the worker."""
        self.prefix_watch = PrefixWatch(self.page_size)
        """Hears of every page that is inserted into the tree."""
        self.states = KeptStates(limits.kept_states, num_pages)
        if disk is not None:
            disk.keep_states(self.states, limits.state_bytes)
        self.state_orders = StateOrders(limits, slots, self.states)
        self.sessions = Sessions(self.tree)
        max_pinned = int(limits.settings.max_pinned_fraction * num_pages)
        self.leases = Leases(self.tree, max_pinned, clock, num_pages, self.states)
        self.evicted_pages = 0
        self._slots = slots
        self._share = limits.shares_prefixes
        self._clock = clock

    def begin_plan(self, step: int, num_in_flight: int) -> None:
        """Begin the plan of a step; see :meth:`KeptStates.begin_plan`."""
        self.states.begin_plan(step, num_in_flight)
        if self.disk is not None:
            self.disk.begin_plan()

    def keep_record(self, record: PoolRecord) -> int:
        """Take the prefixes that a dead scheduler has left in the pool into the tree, which is
        empty, and record its changes from now on, and the pages of running sequences; returns the
        number of the pages that were taken over."""
        if not self._share:
            return 0
        self.record = self.states.record = record
        self.allocator.take(take_over(record, self.tree, self.states))
        return self.tree.num_pages

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` can give."""
        return self.allocator.num_free + self.tree.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> Pages:
        """``count`` pages (at most ``num_available``), evicted from the tree if need be."""
        missing = count - self.allocator.num_free
        if missing > 0:
            pages = self.tree.evict(missing, partial(eviction_rule, self._policy_name))
            if self.disk is not None and len(pages):
                self.disk.evicted()
            self._free_evicted(pages)
        return self.allocator.allocate(count)

    def _free_evicted(self, pages: Pages) -> int:
        self._free(pages)
        self.evicted_pages += len(pages)
        return len(pages)

    def _free(self, pages: Pages) -> None:
        """Free pages, and the states behind them."""
        if self.states:
            self.states.drop(pages)
        self.allocator.free(pages)

    def _free_own(self, pages: Pages) -> None:
        """Free pages of a sequence that have not entered the tree."""
        if self.record is not None:
            self.record.removed(pages)
        self._free(pages)

    def flush(self) -> int:
        """Evict all pages that no running sequence uses and no lease holds; returns their
        number. Pages on disk are forgotten too."""
        pages = self.tree.evict(self.tree.num_evictable_pages, lambda leaf, is_above_share: "flush")
        if self.disk is not None:
            self.disk.flush()
        return self._free_evicted(pages)

    # ------------------------------------------------------------ a sequence's life

    def find_prefix(self, sequence: Sequence) -> Match | None:
        """The longest cached prefix of :meth:`Sequence.cacheable_tokens`."""
        if not self.reads_tree(sequence):
            return None
        return self.tree.match(sequence.cacheable_tokens(), sequence.root)

    def usable_tokens(self, match: Match | None) -> int:
        """Leading tokens of a found prefix that need not be computed: all, or those up to the
        nearest state where layers have one."""
        if match is None:
            return 0
        if not self.states:
            return match.num_pages * self.page_size  # without a look at the pages
        return self._usable(match.pages)[0]

    def _usable(self, pages: Pages) -> tuple[int, int]:
        """Leading tokens of a prefix that need not be computed, and the state behind them."""
        num_pages, state = self.states.nearest(pages) if self.states else (len(pages), SAME_STATE)
        return num_pages * self.page_size, state

    def is_state_coming(self, match: Match | None) -> bool:
        """Whether the plan in the making keeps a state of a found prefix that is better than what
        there is, so that it is worth to wait for the next plan."""
        if match is None or not self.states:
            return False
        pages = match.pages
        return self.states.is_coming(pages, self.states.nearest(pages)[0])

    def is_better_state_coming(self, sequence: Sequence) -> bool:
        """The same of a running sequence, whose prompt is partly computed."""
        if not self.states or (match := self.find_prefix(sequence)) is None:
            return False
        planned = int(self._slots.planned[sequence.slot]) // self.page_size
        return self.states.is_coming(match.pages, planned)

    def note_facts(self, sequence: Sequence, match: Match | None) -> None:
        """Note where the prompt of a sequence that is admitted now leaves the tree."""
        if not self.reads_tree(sequence):
            sequence.cache_facts = CacheFacts(reusable_tokens=0)
            return
        sequence.cache_facts = facts = cache_facts(self.tree, sequence, match)
        facts.disk = sequence.disk_read
        if match is not None:
            facts.stateless_tokens = match.num_pages * self.page_size - self.usable_tokens(match)

    def expect(self, sequence: Sequence, match: Match) -> None:
        """Tell the eviction policy of a waiting sequence and its cached prefix.

        Splits the edge in which the prefix ends, so ``match`` must not be used any more.
        """
        if self.policy.follows_queue:
            node = match.node
            if 0 < match.pages_in_edge < node.num_pages:
                node = self.tree.split(node, match.pages_in_edge)
            self.policy.expect(sequence.seq_id, sequence.arrived, node)

    def missing_page(self, sequence: Sequence, num_cached: int) -> MissingPage | None:
        """The page that must be inserted before :meth:`find_prefix` can find more than
        ``num_cached`` pages.

        None: there is no such page.
        """
        if not self.reads_tree(sequence):
            return None
        tokens = sequence.cacheable_tokens()
        start, end = num_cached * self.page_size, (num_cached + 1) * self.page_size
        if end > len(tokens):
            return None  # the remaining tokens are computed in any case
        return sequence.root, num_cached, tokens[start:end].tobytes()

    def reads_tree(self, sequence: Sequence) -> bool:
        """Whether a sequence uses prefixes of others."""
        return self._share and sequence.reads_cache

    def num_pages_locked_by(self, match: Match | None) -> int:
        """Evictable pages that a lock on this prefix would lock."""
        return 0 if match is None else match.num_unlocked_pages

    def draft_sources(self, sequence: Sequence, match: Match | None) -> DraftSources:
        """Texts from which tokens of a sequence may be drafted that is admitted now on top of a
        cached prefix."""
        followed = NO_TOKENS
        if match is not None and self.reads_tree(sequence):
            rest = sequence.known_tokens()[match.num_pages * self.page_size :]
            limit = sequence.max_output - sequence.num_output
            followed = continuation(self.tree, match, rest, min(limit, MAX_CONTINUED))
            followed = followed[: np.argmax(np.append(followed, -1) < 0)]  # no image is drafted
        return DraftSources(
            continuation=pack_ids(tokens_of(followed)),
            prediction=sequence.prediction,
            root=sequence.root if self._share else None,
        )

    def break_leases_for(self, sequence: Sequence, match: Match | None) -> None:
        """Break leases until there are pages for all known tokens of a sequence."""
        missing = self.pages_for(sequence.num_tokens) - (0 if match is None else match.num_pages)
        while missing > self.num_available - self.num_pages_locked_by(match):
            if not self.leases.revoke_soonest():
                return

    def enter(self, sequence: Sequence, match: Match | None) -> int:
        """Put a sequence into a slot, on top of a cached prefix; returns the kept state from which
        it starts."""
        tenant = sequence.options.tenant
        if tenant.cache_namespace:
            share = tenant.max_cached_fraction
            most = None if share is None else int(share * self.allocator.num_pages)
            self.tree.limit_share(tenant.cache_namespace, most)
        self.begin_visit(sequence, match)
        if match is None:
            pages, sequence.node = NO_PAGES, self.tree.lock_root(sequence.root)
        else:
            pages, sequence.node = match.pages, self.tree.lock_match(match)
            self._used_again(pages)
        self._slots.put(sequence, pages)
        return self._start_from_state(sequence, pages)

    def begin_visit(self, sequence: Sequence, match: Match | None) -> None:
        """Let the eviction policy learn from a sequence that begins, if it does so."""
        if self.policy.hazards is not None and sequence.visit is None:
            before = turn_before(self.tree, sequence, match)
            sequence.visit = self.policy.hazards.begin(before, self._clock())

    def _start_from_state(self, sequence: Sequence, pages: Pages) -> int:
        """Let a sequence go on behind the nearest state of its prefix; returns the state.

        It computes the tokens behind it once more, and writes K and V into the pages of the tree
        again: the same bits.
        """
        usable, state = self._usable(pages)
        usable = sequence.before_image(usable)
        self._slots.planned[sequence.slot] = sequence.kept_to = usable
        if self.states:
            end = len(pages) * self.page_size
            sequence.branch = end if end > usable else 0
            sequence.answer_states = []
            if state >= 0:
                self.states.use(state)
        return state

    def _used_again(self, pages: Pages) -> None:
        """Tell the pages on disk of a prefix of which another sequence has had use before."""
        if self.disk is not None and len(pages):
            self.disk.used(pages)

    def has_longer_prefix(self, sequence: Sequence) -> bool:
        """Whether the tree may hold more of a running sequence's prompt than the sequence uses."""
        assert sequence.node is not None
        beyond = int(self._slots.num_tree_pages[sequence.slot]) * self.page_size
        return self.tree.holds_first_page(sequence.node, sequence.cacheable_tokens()[beyond:])

    def adopt_longer_prefix(self, sequence: Sequence) -> int | None:
        """Switch to pages that other sequences have planned meanwhile, if they reach further.

        So two sequences over one long document compute alternate chunks of it, and none of it
        twice.

        Returns:
            The state from which it goes on; None: there is no longer prefix.
        """
        slots, slot = self._slots, sequence.slot
        if not self.states and not self.has_longer_prefix(sequence):
            return None  # nothing new; saves a lookup of the whole prompt
        assert sequence.node is not None
        match = self.find_prefix(sequence)
        if match is None:
            return None
        usable = sequence.before_image(self.usable_tokens(match))
        if usable <= slots.planned[slot]:
            return None
        pages, node = match.pages, self.tree.lock_match(match)
        self._used_again(pages)
        self.tree.unlock(sequence.node)
        sequence.node = node
        own = slots.own_pages(slot)
        slots.set_tree_pages(slot, pages)
        state = self._start_from_state(sequence, pages)
        self._free_own(own)
        return state

    def grow(self, sequence: Sequence, num_tokens: int) -> Pages:
        """Extend the block table towards ``num_tokens`` tokens, as far as there are pages."""
        missing = self.pages_for(num_tokens) - int(self._slots.num_pages[sequence.slot])
        pages = self.allocate(min(max(missing, 0), self.num_available))
        self._slots.append_pages(sequence.slot, pages)
        return pages

    def grow_each(
        self, slots: NDArray[np.intp], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], Pages]:
        """Append ``counts[i]`` pages to the block table of ``slots[i]``; there must be enough.

        Returns:
            The page of every growth, and the slot it went to, in the order of each block table.
        """
        total, table = int(counts.sum()), self._slots
        growing = np.repeat(slots, counts)
        if not total:
            return growing, NO_PAGES
        rank = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        pages = self.allocate(total)
        table.block_tables[growing, table.num_pages[growing] + rank] = pages
        table.num_pages[slots] += counts
        return growing, pages

    def publish_prefill(self, sequence: Sequence) -> None:
        """Insert the full pages that are planned so far into the tree, for all sequences planned
        later."""
        if not self.reads_tree(sequence):
            return
        slot = sequence.slot
        start, full = self._unpublished(sequence)
        if start >= full:
            return
        assert sequence.node is not None
        tokens = sequence.tokens[start * self.page_size : full * self.page_size]
        if self.tree.holds_first_page(sequence.node, tokens):
            return  # the last page of a known prompt, computed again for its logits: stays our own
        node, existing = self.tree.insert(
            sequence.node, tokens, self._slots.block_tables[slot, start:full]
        )
        self._inserted(sequence, start + existing, full)
        self._note_end(sequence, node)
        sequence.written_tokens += (full - start - existing) * self.page_size
        self.tree.move_lock(sequence.node, node)
        sequence.node = node
        self._slots.num_tree_pages[slot] = full

    def leave(self, sequence: Sequence, *, ended: bool = True) -> None:
        """Take a sequence out of its slot. Full pages with known tokens stay in the tree, unlocked.

        Args:
            ended: it is not retracted, so its cache hints apply from now on.
        """
        slots, slot = self._slots, sequence.slot
        assert sequence.node is not None
        own = slots.own_pages(slot)
        for _, page in sequence.answer_states:
            self.states.settle(page)
        start, full = self._unpublished(sequence)
        if self._share and start < full:
            tokens = sequence.tokens[start * self.page_size : full * self.page_size]
            end, existing = self.tree.insert(sequence.node, tokens, own[: full - start])
            self.tree.move_lock(sequence.node, end)
            sequence.node = end
            self._inserted(sequence, start + existing, full)
            if self.disk is not None:
                prompt_pages = sequence.num_prompt // self.page_size
                self.disk.answered(own[max(existing, prompt_pages - start) : full - start])
            if self.states and existing:
                known = end.prefix_pages()
                self.states.move(own[:existing], known[start : start + existing])
            own = np.concatenate((own[:existing], own[full - start :]))
        self._free_own(own)
        if self._share:
            tail = sequence.tokens[max(start, full) * self.page_size : sequence.num_tokens]
            self._note_end(sequence, sequence.node, tail[: 2 * self.page_size].tobytes())
        if ended and self._share:
            self._apply_hints(sequence.options, sequence.root, sequence.node, max(start, full))
            if self.policy.hazards is not None and sequence.visit is not None:
                visit, num_own = sequence.visit, sequence.node.num_own_pages
                visit.num_pages = max(start, full)
                self.policy.hazards.end(visit, sequence.num_output, num_own, self._clock())
                sequence.node.note_visit(visit)
        self.tree.unlock(sequence.node)
        sequence.node = None
        slots.remove(sequence)

    def _note_end(self, sequence: Sequence, node: Node, tail: bytes = b"") -> None:
        node.end = SequenceEnd(sequence.seq_id, sequence.options.tenant.name, tail)

    def use_again(self, tokens: TokenIds, options: RequestOptions) -> bool:
        """Use the pages of a sequence that has ended, as a request with these options that ends
        now. False: the tree does not hold all of them any more."""
        num_pages = len(tokens) // self.page_size
        match = self.tree.match(tokens, options.root) if self._share else None
        if match is None or match.num_pages < num_pages:
            return self._share and num_pages == 0
        if num_pages:
            node = self.tree.lock_match(match)
            self._used_again(match.pages)
            self._apply_hints(options, options.root, node, num_pages)
            self.tree.unlock(node)
        return True

    def _apply_hints(
        self, options: RequestOptions, root: CacheRoot, end: Node, num_pages: int
    ) -> None:
        """Apply a request's hints to the ``num_pages`` pages up to ``end``, on which it holds its
        lock."""
        hints = options.cache_hints
        priority = options.priority if self.policy.orders_by_priority else 0
        apply_hints(self.tree, end, num_pages, hints, self._clock(), priority)
        if hints.session:
            self.sessions.note(hints.session, root, end)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot and drop its KV, except for pages that other running
        sequences use."""
        slots, node = self._slots, sequence.node
        assert node is not None
        self._free_own(slots.own_pages(sequence.slot))
        self.tree.unlock(node)
        self._free(self.tree.prune(node))
        if self.disk is not None:
            self.disk.forget_removed()
        sequence.node = None
        slots.remove(sequence)

    def _inserted(self, sequence: Sequence, start: int, end: int) -> None:
        """Tell the prefix watch that the tree has got the pages ``start`` to ``end`` of a
        sequence."""
        tokens = sequence.tokens[start * self.page_size : end * self.page_size]
        self.prefix_watch.inserted(sequence.root, start, tokens)

    # ------------------------------------------------------------ pages from disk

    def pin(
        self,
        tokens: TokenIds,
        root: CacheRoot,
        ttl_s: float,
        lease_id: str = "",
        tenant: Tenant = NO_TENANT,
    ) -> Lease:
        """Lease a cached prefix, see :meth:`Leases.pin`; it is written to disk, too."""
        lease = self.leases.pin(tokens, root, ttl_s, lease_id, tenant)
        self._used_again(Match(lease.node, lease.num_pages, lease.node.num_pages).pages)
        return lease

    def publish_read(
        self, node: Node, root: CacheRoot, start: int, tokens: TokenIds, pages: Pages
    ) -> Pages:
        """Insert pages that were read from disk behind a held prefix, and let go of it; returns the
        pages of the whole prefix.

        Args:
            node: at whose end the prefix ends.
            start: pages of the prefix.
            tokens: of the pages that were read: [n * page_size], int32.
            pages: all that were allocated for them: [at least n]; those beyond n are freed.
        """
        count = len(tokens) // self.page_size
        end, existing = node, 0
        if count:
            end, existing = self.tree.insert(node, tokens, pages[:count])
            new = tokens[existing * self.page_size :]
            self.prefix_watch.inserted(root, start + existing, new)
        self._free(np.concatenate((pages[:existing], pages[count:])))
        self.tree.hold(end)
        self.tree.let_go(node)
        self.tree.let_go(end)
        return end.prefix_pages()

    def _unpublished(self, sequence: Sequence) -> tuple[int, int]:
        """The range of full pages with known tokens that are not in the tree yet: start, end."""
        computed = min(int(self._slots.planned[sequence.slot]), sequence.num_tokens)
        return int(self._slots.num_tree_pages[sequence.slot]), computed // self.page_size
