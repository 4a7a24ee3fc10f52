"""Replays prompts through a radix tree and explains their misses.

The answers of a log are mostly not recorded. Where a request goes on from an earlier one, its next
message of the assistant is taken for the answer, which the cache would have had.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from radixrt.base.sampling_params import SamplingParams
from radixrt.cli.lint.recorded import Recorded
from radixrt.messages.cache_explanation import CacheExplanation, CacheFacts
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds, pack_ids, unpack_ids
from radixrt.messages.requests import CacheHints, RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.radix.divergence import cache_facts
from radixrt.scheduler.radix.node import SequenceEnd
from radixrt.scheduler.radix.page_allocator import PageAllocator
from radixrt.scheduler.radix.tree import RadixTree
from radixrt.scheduler.sequence import Sequence
from radixrt.tokenizer.explain.explainer import CONTEXT_TOKENS, Explainer, volatile_at_divergence
from radixrt.tokenizer.explain.records import ChatLayout, PromptRecord
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import PromptEncoder
from radixrt.tokenizer.vocabulary import Vocabulary

_UNLIMITED = 1 << 30
"""Tokens."""

_EXPLAIN = CacheHints(explain=True)


@dataclass(frozen=True)
class Linted:
    """A request of the log, explained."""

    line: int
    explanation: CacheExplanation
    lost_tokens: int
    """Missed tokens that the cache would have had but for the cause."""


class PromptLinter:
    """Explains requests in the order in which they came.

    Args:
        cache_tokens: size of the cache; None: without a limit.
    """

    def __init__(
        self, vocabulary: Vocabulary, page_size: int, cache_tokens: int | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = PromptEncoder(vocabulary)
        self._limits = Limits(_UNLIMITED, _UNLIMITED, vocabulary.backend.get_vocab_size())
        self._explainer = Explainer(vocabulary, page_size, max_bytes=_UNLIMITED)
        self._cache = _Cache(page_size, cache_tokens or _UNLIMITED)
        self._larger = _Cache(page_size, _UNLIMITED) if cache_tokens else None
        """Shows what was evicted."""

    def lint(self, number: int, request: Recorded) -> Linted:
        """
        Args:
            number: of the request, ascending.

        Raises:
            RequestError: the template refuses it, or it is empty.
        """
        encoded = self._encoder.encode(request.prompt, self._limits, request.root)
        packed = pack_ids(encoded.token_ids)
        record = PromptRecord(str(request.line), "", packed, encoded.layout, [number])
        sequence = _sequence(number, packed, request.root)
        facts = self._cache.facts(sequence)
        if self._note_answer(record, facts, request.root):
            facts = self._cache.facts(sequence)
        explanation = self._explainer.explain(record, facts)
        lost = self._lost_tokens(record, sequence, facts, explanation)
        self._explainer.records.add(record)
        self._insert(unpack_ids(packed), request.root, number)
        return Linted(request.line, explanation, lost)

    def _insert(self, tokens: TokenIds, root: CacheRoot, seq_id: int) -> None:
        for cache in (self._cache, self._larger):
            if cache is not None:
                cache.insert(tokens, root, seq_id)

    def _note_answer(self, record: PromptRecord, facts: CacheFacts, root: CacheRoot) -> bool:
        """Let the cache have the answer to the earlier request that this one goes on from, if it
        goes on from one."""
        earlier, layout = self._explainer.records.of_sequence(facts.seq_id), record.layout
        if earlier is None or earlier.layout is None or layout is None:
            return False
        alike = len(earlier.layout.messages)
        if layout.num_alike(earlier) < alike or layout.roles[alike : alike + 1] != ["assistant"]:
            return False
        earlier.answers.add(layout.messages[alike])
        if facts.seen_tokens < earlier.num_tokens:
            return False
        end = self._token_at(record, layout, layout.spans[alike][1])
        self._insert(unpack_ids(record.token_ids)[:end], root, facts.seq_id)
        return True

    # ------------------------------------------------------------ what would have been saved

    def _lost_tokens(
        self,
        record: PromptRecord,
        sequence: Sequence,
        facts: CacheFacts,
        explanation: CacheExplanation,
    ) -> int:
        end = 0
        match explanation.cause:
            case "evicted" if self._larger is not None:
                end = self._larger.facts(sequence).cached_tokens
            case "other_salt":
                end = facts.other_salt_tokens
            case "volatile_text":
                end = self._end_of_volatile(record, facts)
            case "tools_changed" | "template_rewrote_history":
                end = self._end_of_alike(record, facts)
        page_size = self._cache.tree.page_size
        return max(
            0, min(end, facts.reusable_tokens) // page_size * page_size - facts.cached_tokens
        )

    def _end_of_volatile(self, record: PromptRecord, facts: CacheFacts) -> int:
        """The token up to which the prompt would be that of the earlier request, but for volatile
        text."""
        earlier = self._explainer.records.of_sequence(facts.seq_id)
        if earlier is None:
            return 0
        start = max(0, facts.seen_tokens - CONTEXT_TOKENS)
        text, other = (self._text(one, start, one.num_tokens) for one in (record, earlier))
        found = volatile_at_divergence(text, other)
        if found is None:
            return 0
        return _first(
            start, record.num_tokens, found.end, lambda t: len(self._text(record, start, t))
        )

    def _end_of_alike(self, record: PromptRecord, facts: CacheFacts) -> int:
        """The token at which the last message ends that the earlier request has too."""
        earlier, layout = self._explainer.records.of_sequence(facts.seq_id), record.layout
        if earlier is None or layout is None or (alike := layout.num_alike(earlier)) == 0:
            return 0
        return self._token_at(record, layout, layout.spans[alike - 1][1])

    def _token_at(self, record: PromptRecord, layout: ChatLayout, position: int) -> int:
        """The token that begins at a place of the text, in characters, or the first behind it."""

        def begin(token: int) -> int:
            return layout.position(token, lambda a, b: len(self._text(record, a, b)))

        return _first(0, record.num_tokens, position, begin)

    def _text(self, record: PromptRecord, start: int, end: int) -> str:
        return self._vocabulary.decode(record.ids(start, end))


class _Cache:
    """A radix tree with a pool of pages that holds no KV."""

    def __init__(self, page_size: int, tokens: int) -> None:
        self.tree = RadixTree(page_size)
        self._free = PageAllocator(max(1, tokens // page_size)) if tokens < _UNLIMITED else None
        self._num_pages = 0

    def facts(self, sequence: Sequence) -> CacheFacts:
        """Where a prompt leaves the tree."""
        match = self.tree.match(sequence.cacheable_tokens(), sequence.root)
        facts = cache_facts(self.tree, sequence, match)
        facts.cached_tokens = 0 if match is None else match.num_pages * self.tree.page_size
        return facts

    def insert(self, tokens: TokenIds, root: CacheRoot, seq_id: int) -> None:
        """Let the tree have a sequence."""
        tree, page_size = self.tree, self.tree.page_size
        match = tree.match(tokens, root)
        node = tree.lock_root(root) if match is None else tree.lock_match(match)
        start = 0 if match is None else match.num_pages
        pages = self._allocate(len(tokens) // page_size - start)
        full = start + len(pages)
        end, _ = tree.insert(node, tokens[start * page_size : full * page_size], pages)
        tree.move_lock(node, end)
        end.end = SequenceEnd(seq_id, "", tokens[full * page_size :][:page_size].tobytes())
        tree.unlock(end)

    def _allocate(self, count: int) -> TokenIds:
        if self._free is None:
            self._num_pages += count
            return np.arange(self._num_pages - count, self._num_pages, dtype=np.int32)
        if (missing := count - self._free.num_free) > 0:
            self._free.free(self.tree.evict(missing, lambda leaf, is_above_share: "lru"))
        return self._free.allocate(min(count, self._free.num_free))


def _sequence(number: int, packed: bytes, root: CacheRoot) -> Sequence:
    options = RequestOptions(sampling=SamplingParams(max_tokens=1), root=root, cache_hints=_EXPLAIN)
    return Sequence(SequenceRequest(seq_id=number, token_ids=packed, options=options), 0.0, ())


def _first(start: int, stop: int, least: int, key: Callable[[int], int]) -> int:
    """The first of the ascending numbers whose key is at least ``least``; ``stop`` if none is."""
    return start + bisect_left(range(start, stop), least, key=key)
