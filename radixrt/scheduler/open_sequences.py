"""The sequences that are accepted and have not ended: accepts them or refuses them, keeps each where
it waits until it is admitted, and takes it out of wherever it is when it ends.

A sequence waits in one place at a time: with the grammars or the images that it names, until they
are loaded (:mod:`radixrt.scheduler.loaded_parts`); then in the queue, or among the work for idle
times; from there it may wait for pages from disk. Then it runs, in a slot.
"""

import math

from radixrt.messages.grammars import GrammarLoaded
from radixrt.messages.images import ImageLoaded
from radixrt.messages.sequences import SequenceRefused, SequenceRequest
from radixrt.scheduler.adapters import AdapterRegistry
from radixrt.scheduler.lazy_heap import LazyHeap
from radixrt.scheduler.loaded_parts import GrammarRegistry, ImageRegistry
from radixrt.scheduler.planner import Planner
from radixrt.scheduler.queue.admission import Admission
from radixrt.scheduler.queue.wait_forecast import QueueTime, WaitForecast
from radixrt.scheduler.sequence import NO_SLOT, Groups, Sequence
from radixrt.scheduler.state import SchedulerState


class OpenSequences:
    """The sequences of one scheduler from their arrival to their end, by id.

    Args:
        parts: what sequences name by a key and wait for.
    """

    def __init__(
        self,
        state: SchedulerState,
        planner: Planner,
        admission: Admission,
        adapters: AdapterRegistry,
        parts: tuple[GrammarRegistry, ImageRegistry],
    ) -> None:
        self._state = state
        self._planner = planner
        self._admission = admission
        self._adapters = adapters
        self._parts = parts
        self.groups = Groups()
        self.waits = WaitForecast(state, self.groups)
        limit_s = state.limits.settings.max_queue_seconds or math.inf
        self.queue_time = QueueTime(limit_s, self.waits, state.clock)
        self._by_id: dict[int, Sequence] = {}
        self._deadlines: LazyHeap[int] = LazyHeap()
        """The sequences that have one."""

    def get(self, seq_id: int) -> Sequence | None:
        """A sequence; None: there is none of this id, or it has ended."""
        return self._by_id.get(seq_id)

    def ids(self) -> list[int]:
        """The ids of all, in the order of arrival."""
        return list(self._by_id)

    @property
    def num_set_aside(self) -> int:
        """Sequences that wait outside the queue, for grammars, images or pages from disk."""
        reads = self._state.reads
        loading = sum(parts.num_waiting for parts in self._parts)
        return loading + (0 if reads is None else reads.num_waiting)

    # ------------------------------------------------------------ arrivals

    def accept(self, request: SequenceRequest) -> Sequence | SequenceRefused:
        """The sequence of a request, which :meth:`queue` takes next; or the reason for its
        refusal."""
        limits = self._state.limits
        sequence = Sequence(request, self._state.clock(), limits.eos_token_ids)
        sequence.keeps_images_whole = limits.whole_images
        if (refused := self._refusal(request, sequence)) is not None:
            self._state.counters.refused += 1
            return refused
        wants_drafts = request.options.speculation and sequence.max_output > 1
        sequence.speculates = limits.speculates and wants_drafts
        self._by_id[sequence.seq_id] = sequence
        self._adapters.use(sequence)
        sequence.group = self.groups.join(request)
        if not sequence.is_idle:
            self.queue_time.watch(sequence)
        if request.options.deadline is not None:
            self._deadlines.place(sequence.seq_id, request.options.deadline)
        return sequence

    def pass_by(self, request: SequenceRequest) -> None:
        """Count a sequence of a group that ends as it arrives."""
        self.groups.leave(self.groups.join(request))

    def queue(self, sequence: Sequence) -> None:
        """Let a sequence wait until it is admitted; at first for its grammar and images, if these
        are not loaded."""
        if any(parts.keep_waiting(sequence) for parts in self._parts):
            return
        if sequence.is_idle:
            self._state.idle.add(sequence)
        else:
            self._state.waiting.add(sequence)

    def loaded(
        self, parts: GrammarRegistry | ImageRegistry, message: GrammarLoaded | ImageLoaded
    ) -> list[SequenceRefused]:
        """Queue the sequences that have waited for a grammar or an image, or refuse them."""
        refused = []
        for sequence in parts.loaded(message):
            if (lost := parts.refusal(sequence.seq_id, message.key)) is None:
                self.queue(sequence)
            else:
                self._forget(sequence)
                refused.append(lost)
        self._state.counters.refused += len(refused)
        return refused

    def _refusal(self, request: SequenceRequest, sequence: Sequence) -> SequenceRefused | None:
        """Why a sequence is not accepted; None: it is. What has begun elsewhere, and the others of
        a group whose first was accepted, are never refused for their wait."""
        may_wait = request.has_begun or self.groups.knows(request)
        if not may_wait and (full := self._refusal_beyond_queue(request)):
            return full
        for parts in self._parts:
            if lost := parts.refuse(sequence):
                return lost
        if (gone := self._adapters.refusal(request.options)) is not None:
            return SequenceRefused(request.seq_id, gone, 503)
        if sequence.is_idle:
            return self._state.idle.refusal(sequence)
        if may_wait:
            return None
        return self.queue_time.refusal(sequence, self._admission.full_at)

    def _refusal_beyond_queue(self, request: SequenceRequest) -> SequenceRefused | None:
        """Refuse a sequence if as many wait as may."""
        most, waiting = self._state.limits.settings.max_queued_requests, self._state.waiting
        num_waiting = len(waiting) + self.num_set_aside + self.groups.num_to_come
        if num_waiting < most or waiting.has_place_for(request.options.tenant, most):
            return None
        message = f"The server's queue is full ({num_waiting} sequences wait); retry later."
        return SequenceRefused(request.seq_id, message, 503, self._retry_after_s())

    def _retry_after_s(self) -> int:
        """An estimate of the time until the running answers have ended: mean step time times mean
        answer length."""
        counters, running = self._state.counters, self._state.slots.running()
        mean_step_s = counters.step_seconds.total / counters.steps if counters.steps else 0.1
        mean_output = self._state.outputs.mean()
        if mean_output is None:
            mean_output = sum(one.max_output / 2 for one in running) / max(1, len(running))
        return max(1, min(60, round(mean_step_s * mean_output)))

    # ------------------------------------------------------------ departures

    def end(self, sequence: Sequence, *, keep_kv: bool = True) -> None:
        """A sequence has ended, or is dropped where it waits or runs.

        Args:
            keep_kv: its full pages stay in the tree.
        """
        self._forget(sequence)
        if sequence.slot != NO_SLOT:
            self._planner.leave(sequence, keep_kv=keep_kv)
            return
        reads = self._state.reads
        if any(parts.stop_waiting(sequence) for parts in self._parts):
            return
        if reads is not None and reads.stop_waiting(sequence):
            return
        self._state.waiting.remove(sequence.seq_id)
        self._state.idle.remove(sequence.seq_id)

    def end_overdue(self) -> list[SequenceRefused]:
        """End the sequences that have waited for --max-queue-seconds, with their groups; returns
        their refusals."""
        refused = []
        for sequence, refusal in self.queue_time.overdue():
            self.end(sequence)
            refused.append(refusal)
        self._state.counters.refused += len(refused)
        return refused

    def end_expired(self, now: float) -> Sequence | None:
        """End the sequence with the earliest deadline, if that has passed at ``now``, Unix time."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        sequence = self._by_id[self._deadlines.first()]
        self.end(sequence)
        return sequence

    def next_deadline(self) -> float | None:
        """Unix time of the earliest deadline."""
        if not len(self._deadlines):
            return None
        return self._by_id[self._deadlines.first()].options.deadline

    def _forget(self, sequence: Sequence) -> None:
        del self._by_id[sequence.seq_id]
        self._deadlines.discard(sequence.seq_id)
        self.queue_time.forget(sequence.seq_id)
        self.groups.leave(sequence.group)
        self._adapters.leave(sequence)
