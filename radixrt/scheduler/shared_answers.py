"""Computes equal answers once: requests in flight with the same key share a sequence, and finished
answers are given again while the tree holds their tokens.

An answer is a function of its key: the client's key and salt, adapter, tokens, sampling parameters
with the seed, and the use of a grammar. The key is taken from what reaches the worker, not from the
JSON of the request. A request that draws without a seed has none, nor has one that asks how its
answer was computed (log-probabilities, masses, explanations, receipts).

A *subscriber* is a request that gets the tokens of a sequence that another request began. The
sequence goes on until the last of its clients leaves.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from radixrt.messages.answers import AnswerReport, FinishReason
from radixrt.messages.ids import PackedIds, num_ids, pack_ids, unpack_ids
from radixrt.messages.requests import NO_HINTS, RequestOptions
from radixrt.messages.sequences import SequenceOutput, SequenceRequest, TokenBatch
from radixrt.messages.stats import Counters
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.sequence import Sequence

ALL_TOKENS = 2**31 - 1
"""``replayed_tokens`` of a report about an answer of which every token was computed for another
request."""

ANSWER_BYTES = 200
"""Memory of a finished answer beside its tokens, about."""


def answer_key(request: SequenceRequest) -> bytes | None:
    """A digest of all that the answer of a request depends on, but ``max_tokens``, and of whom it
    may be given to; None: it is not shared."""
    options = request.options
    if not options.shares_answers or options.pool is not None or not options.sampling.max_tokens:
        return None
    return _digest(
        (
            options.tenant.name,
            options.root,
            replace(options.sampling, max_tokens=None),
            request.token_ids,
            request.key_ids,
            request.num_output,
            request.grammar,
            request.second_segment_start,
        )
    )


def _digest(parts: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()


def _key_in_flight(key: bytes, options: RequestOptions) -> bytes | None:
    """The key of requests that may share a sequence: they also wait alike, and hint alike."""
    if options.deadline is not None:
        return None
    hints = options.cache_hints
    waits = options.sampling.max_tokens, options.priority, options.progress, options.speculation
    return _digest((key, waits, None if hints == NO_HINTS else hints))


class FinishedAnswer(NamedTuple):
    """The tokens of an answer that has ended."""

    token_ids: PackedIds
    """Those that were generated, with a stop token at their end."""
    reason: FinishReason | None
    """None: a stop string ended it, which the tokenizer process will find again."""
    stop_reason: str | int | None

    @property
    def num_bytes(self) -> int:
        return ANSWER_BYTES + len(self.token_ids)


@dataclass(slots=True, eq=False)
class _Shared:
    """A sequence that several requests may read."""

    sequence: Sequence
    key: bytes
    """The answer's."""
    key_in_flight: bytes | None
    subscribers: dict[int, float]
    """The ids of further requests, and their times of arrival."""
    num_before: int
    """Tokens of the answer that each client had before."""
    has_own_client: bool = True


class SharedAnswers:
    """The answers of one scheduler that are computed once for several requests.

    Args:
        max_bytes: memory for finished answers; the least recently used are dropped.
    """

    def __init__(
        self, kv: KVCache, counters: Counters, clock: Callable[[], float], max_bytes: int
    ) -> None:
        self._kv = kv
        self._counters = counters
        self._clock = clock
        self._max_bytes = max_bytes
        self._in_flight: dict[bytes, _Shared] = {}
        self._by_seq_id: dict[int, _Shared] = {}
        """By the id of its sequence, and by those of its subscribers."""
        self._finished: OrderedDict[bytes, FinishedAnswer] = OrderedDict()
        self._num_bytes = 0
        self._outputs = TokenBatch()

    # ------------------------------------------------------------ arrivals

    def serve(self, request: SequenceRequest, key: bytes) -> bool:
        """Give a request a finished answer, or the tokens of a sequence that runs. False: it has to
        be computed, at least in part."""
        return self._replay_whole(request, key) or self._subscribe(request, key)

    def resumed(self, request: SequenceRequest, key: bytes) -> SequenceRequest:
        """The request, behind the tokens of a finished answer that was shorter than this one may
        be."""
        found = self._find(request, key)
        if found is None:
            return request
        return replace(
            request,
            token_ids=request.token_ids + found.token_ids,
            num_output=request.num_output + num_ids(found.token_ids),
        )

    def begin(self, sequence: Sequence, key: bytes, num_before: int) -> None:
        """Let later requests share a sequence that is queued now.

        Args:
            num_before: tokens of the answer that its client has; it gets the others that are there.
        """
        in_flight = _key_in_flight(key, sequence.options)
        given = sequence.model_tokens()[sequence.num_prompt + num_before :].tolist()
        if given:
            sequence.replayed_tokens = len(given)
            self._note_given(len(given))
            self._outputs.output_of(sequence.seq_id).token_ids = given
        shared = _Shared(sequence, key, in_flight, {}, num_before)
        self._by_seq_id[sequence.seq_id] = shared
        if in_flight is not None:
            self._in_flight.setdefault(in_flight, shared)

    def _replay_whole(self, request: SequenceRequest, key: bytes) -> bool:
        found = self._find(request, key)
        if found is None:
            return False
        most = (request.sampling.max_tokens or 0) - request.num_output
        length = num_ids(found.token_ids)
        if length < most and found.reason != "stop":
            return False
        reason: FinishReason = "stop" if found.reason == "stop" and length <= most else "length"
        tokens = unpack_ids(found.token_ids[: 4 * most]).tolist()
        prompt_tokens = num_ids(request.token_ids) - request.num_output
        started = _as_replayed(AnswerReport(prompt_tokens=prompt_tokens))
        output = self._outputs.output_of(request.seq_id)
        output.token_ids, output.started = tokens, started
        output.finished = replace(
            started,
            output_tokens=request.num_output + len(tokens),
            finish_reason=reason,
            stop_reason=found.stop_reason if reason == "stop" else None,
        )
        self._note_given(len(tokens))
        return True

    def _find(self, request: SequenceRequest, key: bytes) -> FinishedAnswer | None:
        """The finished answer of this key, if the tree holds its tokens."""
        found = self._finished.get(key)
        if found is None:
            return None
        ids = request.key_ids + request.token_ids[len(request.key_ids) :] + found.token_ids
        tokens = unpack_ids(ids)[:-1]  # the last token was never computed
        if not self._kv.use_again(tokens, request.options):
            self._drop(key)
            return None
        self._finished.move_to_end(key)
        return found

    def _subscribe(self, request: SequenceRequest, key: bytes) -> bool:
        in_flight = _key_in_flight(key, request.options)
        shared = None if in_flight is None else self._in_flight.get(in_flight)
        if shared is None:
            return False
        sequence = shared.sequence
        shared.subscribers[request.seq_id] = self._clock()
        self._by_seq_id[request.seq_id] = shared
        if sequence.num_output > shared.num_before:
            output = self._outputs.output_of(request.seq_id)
            known = sequence.model_tokens()[sequence.num_prompt + shared.num_before :]
            output.token_ids = known.tolist()
            self._note_given(len(known))
            if sequence.first_token is not None:
                output.started = _as_replayed(sequence.report)
        return True

    # ------------------------------------------------------------ tokens

    def take_outputs(self) -> TokenBatch | None:
        """The tokens that were given since the last call; None: there are none."""
        if not self._outputs.outputs:
            return None
        outputs, self._outputs = self._outputs, TokenBatch()
        return outputs

    def copy_to_subscribers(self, batch: TokenBatch) -> TokenBatch:
        """Add the outputs and refusals of the subscribers to those of their sequences; each
        sequence that has ended is forgotten."""
        for seq_id, output in list(batch.outputs.items()):
            shared = self._by_seq_id.get(seq_id)
            if shared is None:
                continue
            for subscriber, arrived in shared.subscribers.items():
                batch.outputs[subscriber] = self._copy(output, arrived)
            if output.finished is not None:
                self._end(shared)
        for refused in list(batch.refused):
            if (shared := self._by_seq_id.get(refused.seq_id)) is not None:
                batch.refused.extend(replace(refused, seq_id=one) for one in shared.subscribers)
                self._end(shared)
        return batch

    def _copy(self, output: SequenceOutput, arrived: float) -> SequenceOutput:
        self._note_given(len(output.token_ids))
        end = output.finished
        if end is not None:
            end = replace(_as_replayed(end), total_s=self._clock() - arrived)
        started = None if output.started is None else _as_replayed(output.started)
        return SequenceOutput(
            token_ids=list(output.token_ids),
            started=started,
            finished=end,
            drafts=None if output.drafts is None else {},
            progress=output.progress,
        )

    def _note_given(self, num_tokens: int) -> None:
        self._counters.replayed_tokens += num_tokens

    # ------------------------------------------------------------ departures

    def leave(self, seq_id: int) -> int | None:
        """A client wants no more tokens. Returns the id of the sequence that ends with it; None:
        it goes on for others."""
        shared = self._by_seq_id.get(seq_id)
        if shared is None:
            return seq_id
        if seq_id == shared.sequence.seq_id:
            shared.has_own_client = False
        else:
            shared.subscribers.pop(seq_id)
            del self._by_seq_id[seq_id]
        return None if shared.subscribers or shared.has_own_client else shared.sequence.seq_id

    def keep(self, sequence: Sequence, report: AnswerReport | None) -> None:
        """A sequence has ended, and its answer is complete; it is still among those in flight.

        Args:
            report: the last; None: a stop string ended it.
        """
        shared = self._by_seq_id.get(sequence.seq_id)
        if shared is None or sequence.options.root.adapter:
            return
        tokens = pack_ids(sequence.model_tokens()[sequence.num_prompt + shared.num_before :])
        answer = FinishedAnswer(
            tokens,
            None if report is None else report.finish_reason,
            None if report is None else report.stop_reason,
        )
        if num_ids(tokens) == 0 or answer.num_bytes > self._max_bytes:
            return
        self._drop(shared.key)
        self._finished[shared.key] = answer
        self._num_bytes += answer.num_bytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._finished)))

    def end(self, seq_id: int) -> None:
        """A sequence leaves the scheduler without a further output."""
        if (shared := self._by_seq_id.get(seq_id)) is not None:
            self._end(shared)

    def forget_clients(self) -> None:
        """The clients of all sequences are gone. Finished answers stay."""
        self._in_flight.clear()
        self._by_seq_id.clear()
        self._outputs = TokenBatch()

    def flush(self) -> None:
        """Forget the finished answers."""
        self._finished.clear()
        self._num_bytes = 0

    def _end(self, shared: _Shared) -> None:
        for seq_id in (shared.sequence.seq_id, *shared.subscribers):
            self._by_seq_id.pop(seq_id, None)
        in_flight = shared.key_in_flight
        if in_flight is not None and self._in_flight.get(in_flight) is shared:
            del self._in_flight[in_flight]

    def _drop(self, key: bytes) -> None:
        if (answer := self._finished.pop(key, None)) is not None:
            self._num_bytes -= answer.num_bytes


def _as_replayed(report: AnswerReport) -> AnswerReport:
    """The report of a sequence, for a request that has computed nothing."""
    return replace(
        report,
        cached_tokens=report.prompt_tokens,
        disk_tokens=0,
        cache_write_tokens=0,
        accepted_prediction_tokens=0,
        rejected_prediction_tokens=0,
        drafts={},
        queued_s=0.0,
        prefill_s=0.0,
        total_s=0.0,
        replayed_tokens=ALL_TOKENS,
    )
