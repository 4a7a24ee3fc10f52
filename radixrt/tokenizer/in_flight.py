"""The answers in flight: takes the scheduler's tokens in and sends chunks to the api.

Values that no grammar covers are validated on the way. An answer with an invalid value goes on from
an earlier point, as a new sequence (a retry).
"""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from radixrt.base.errors import RequestError, unexpected_error
from radixrt.constrained.grammar import Grammar, GrammarKey, SpanError
from radixrt.messages.answers import AnswerBatch, AnswerChunk, RequestFailed
from radixrt.messages.ids import pack_ids
from radixrt.messages.sequences import (
    ReleaseSequences,
    SequenceOutput,
    SequenceRefused,
    SequenceRequest,
    TokenBatch,
)
from radixrt.tokenizer.answer.answer_state import AnswerState
from radixrt.tokenizer.constraints.manager import ConstraintManager
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.retry.checked_answer import DueCheck
from radixrt.tokenizer.retry.checked_sequence import CheckedSequence
from radixrt.tokenizer.schedulers import SchedulerLink

log = logging.getLogger(__name__)

Send = Callable[[msgspec.Struct], None]


@dataclasses.dataclass(eq=False)
class _InFlight:
    """One answer, and the sequence that generates it."""

    seq_id: int
    answer: AnswerState
    checked: CheckedSequence | None
    """Holds tokens back until the values in them are validated."""
    grammar_key: GrammarKey | None
    """The key of the grammar that it uses."""
    scheduler: SchedulerLink
    images: list[bytes]
    """The keys of the images that it uses."""

    @property
    def request_id(self) -> str:
        return self.answer.request.request_id

    def release_parts(self) -> None:
        """Count a user less of its grammar and images: the answer is over, and its scheduler knows
        it or was told before."""
        if self.grammar_key is not None:
            self.scheduler.grammars.release(self.grammar_key)
        for key in self.images:
            self.scheduler.images.release(key)

    def parts_lost(self) -> None:
        """Its scheduler can't use its grammar or an image: they are sent again."""
        if self.grammar_key is not None:
            self.scheduler.grammars.lost(self.grammar_key)
        for key in self.images:
            self.scheduler.images.lost(key)


class InFlightAnswers:
    """All answers of this engine that are not complete."""

    def __init__(
        self,
        constraints: ConstraintManager,
        to_api: Send,
        ended: Callable[[AnswerState], None] = lambda answer: None,
    ) -> None:
        """
        Args:
            ended: called with each answer that is complete.
        """
        self._constraints = constraints
        self._ended = ended
        self._to_api = to_api
        self._by_seq_id: dict[int, _InFlight] = {}
        self._seq_ids_of: dict[str, set[int]] = {}
        """Unfinished answers of each request; empty while its prompt is being encoded."""
        self._seq_ids = itertools.count()
        self._validating: set[asyncio.Task[None]] = set()

    @property
    def any(self) -> bool:
        """Whether there are any, or requests whose prompts are being encoded."""
        return bool(self._seq_ids_of)

    def new_seq_id(self) -> int:
        return next(self._seq_ids) & 0x7FFFFFFF

    def expect(self, request_id: str) -> None:
        """Register a request; its answers begin when its prompt is encoded."""
        self._seq_ids_of[request_id] = set()

    def begin(
        self,
        sequence: SequenceRequest,
        answer: AnswerState,
        scheduler: SchedulerLink,
        checked: CheckedSequence | None = None,
        grammar: Grammar | None = None,
        images: Sequence[ProcessedImage] = (),
    ) -> None:
        """Send one answer of a registered request to a scheduler, with the grammar and the images
        that it uses."""
        key = None if grammar is None else grammar.key
        if grammar is not None:
            scheduler.grammars.use(grammar)
        for image in images:
            scheduler.images.use(image, sequence.options.idle)
        keys = [image.key for image in images]
        self._add(_InFlight(sequence.seq_id, answer, checked, key, scheduler, keys))
        scheduler.send(sequence)

    def forget_if_complete(self, request_id: str) -> None:
        """Forget a request whose answers are all complete, as after a takeover of answers that
        nobody has read yet."""
        if not self._seq_ids_of.get(request_id, True):
            del self._seq_ids_of[request_id]

    def abort(self, request_id: str) -> None:
        """End a request's answers where they are; an unknown request is ignored."""
        seq_ids = self._seq_ids_of.get(request_id)
        if seq_ids is None:
            return
        answers = [self._by_seq_id[seq_id].answer for seq_id in sorted(seq_ids)]
        self._drop(request_id)
        try:
            for answer in answers:
                answer.abort()
            self._send_chunks([answer.take_chunk() for answer in answers])
        except Exception as error:
            self._to_api(failure(request_id, error))

    def fail(self, request_id: str, error: Exception) -> None:
        """Drop a request with all its answers, and send the error to the api."""
        self._drop(request_id)
        self._to_api(failure(request_id, error))

    def lose(self, scheduler: SchedulerLink) -> list[str]:
        """Forget the requests that have answers of a dead scheduler; returns their ids."""
        entries = self._by_seq_id.values()
        lost = list(dict.fromkeys(e.request_id for e in entries if e.scheduler is scheduler))
        for request_id in lost:
            for seq_id in self._seq_ids_of.pop(request_id):
                self._pop(seq_id)
        return lost

    def absorb(self, batch: TokenBatch) -> None:
        """Turn a step's tokens into text and send it to the api. Ids of dropped sequences are
        ignored."""
        chunks: list[AnswerChunk | None] = []
        for seq_id, output in batch.outputs.items():
            entry = self._by_seq_id.get(seq_id)
            if entry is None:
                continue
            try:
                if output.progress is not None:
                    chunks.append(entry.answer.progress_chunk(output.progress))
                chunks.append(self._absorb(entry, output))
            except Exception as error:
                self.fail(entry.request_id, error)
        self._send_chunks(chunks)
        for refused in batch.refused:
            self._refuse(refused)

    def _refuse(self, refused: SequenceRefused) -> None:
        """The scheduler has dropped a sequence."""
        entry = self._by_seq_id.get(refused.seq_id)
        if entry is not None:
            if refused.grammar_lost:
                entry.parts_lost()
            error = RequestError(
                refused.message, status=refused.status, retry_after_s=refused.retry_after_s
            )
            self.fail(entry.request_id, error)

    def _absorb(self, entry: _InFlight, output: SequenceOutput) -> AnswerChunk | None:
        if entry.checked is None:
            return self._next_chunk(entry, output, is_over=output.finished is not None)
        entry.checked.absorb(output)
        return self._next_checked_chunk(entry, entry.checked)

    def _next_chunk(
        self, entry: _InFlight, output: SequenceOutput, *, is_over: bool
    ) -> AnswerChunk | None:
        """Let an answer take in tokens that are certain. ``is_over``: the scheduler has ended the
        sequence."""
        answer = entry.answer
        answer.absorb(output)
        chunk = answer.take_chunk()
        if answer.finished:
            self._remove(entry)
            self.forget_if_complete(entry.request_id)
            if not is_over:
                _release([entry], complete=True)
            entry.release_parts()
            self._ended(answer)
        return chunk

    # ------------------------------------------------------------ values that are validated

    def _next_checked_chunk(self, entry: _InFlight, checked: CheckedSequence) -> AnswerChunk | None:
        """Start the validations that are due; the chunk has the tokens that no verdict can take
        back."""
        for due in checked.due():
            task = asyncio.get_running_loop().create_task(self._validate(entry, checked, due))
            self._validating.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._validating.discard)
        output = checked.take_output()
        if output is None:
            return None
        answer = entry.answer
        if checked.violation is not None and not answer.unenforced:
            constraint = answer.request.constraint
            raise self._constraints.report_violation(constraint, checked.text, checked.violation)
        return self._next_chunk(entry, output, is_over=checked.is_over)

    async def _validate(self, entry: _InFlight, checked: CheckedSequence, due: DueCheck) -> None:
        tenant = entry.answer.request.options.tenant
        try:
            errors = await self._constraints.validate(due, tenant.name)
            if self._is_here(entry):
                self._take_verdict(entry, checked, due, errors)
        except Exception as error:
            if self._is_here(entry):
                self.fail(entry.request_id, error)

    def _is_here(self, entry: _InFlight) -> bool:
        return self._by_seq_id.get(entry.seq_id) is entry

    def _take_verdict(
        self,
        entry: _InFlight,
        checked: CheckedSequence,
        due: DueCheck,
        errors: list[SpanError],
    ) -> None:
        """Send more of an answer, or let it go on from an earlier point."""
        again = self._constraints.validated(checked, due, errors, self.new_seq_id())
        if again is not None:
            self._remove(entry)
            _release([entry])
            entry.seq_id = again.seq_id
            self._add(entry)
            entry.scheduler.send(again)
        self._send_chunks([self._next_checked_chunk(entry, checked)])

    # ------------------------------------------------------------ bookkeeping

    def _add(self, entry: _InFlight) -> None:
        self._by_seq_id[entry.seq_id] = entry
        entry.scheduler.num_open += 1
        self._seq_ids_of[entry.request_id].add(entry.seq_id)

    def _remove(self, entry: _InFlight) -> None:
        self._pop(entry.seq_id)
        self._seq_ids_of[entry.request_id].discard(entry.seq_id)

    def _pop(self, seq_id: int) -> _InFlight:
        entry = self._by_seq_id.pop(seq_id)
        entry.scheduler.num_open -= 1
        return entry

    def _drop(self, request_id: str) -> None:
        seq_ids = self._seq_ids_of.pop(request_id, set())
        dropped = [self._pop(seq_id) for seq_id in seq_ids]
        _release(dropped)
        for entry in dropped:
            entry.release_parts()

    def _send_chunks(self, chunks: list[AnswerChunk | None]) -> None:
        if ready := [chunk for chunk in chunks if chunk is not None]:
            self._to_api(AnswerBatch(ready))


def _release(entries: list[_InFlight], *, complete: bool = False) -> None:
    """Tell the scheduler of one request's answers that they need no more tokens."""
    if entries:
        seq_ids = pack_ids(sorted(entry.seq_id for entry in entries))
        entries[0].scheduler.send(ReleaseSequences(seq_ids, complete))


def failure(request_id: str, error: Exception) -> RequestFailed:
    """The message to the api about an error, which is logged if it is not the fault of the
    request."""
    if not isinstance(error, RequestError):
        log.error("Request %s failed in the tokenizer.", request_id, exc_info=error)
        error = unexpected_error()
    return RequestFailed.from_error(error, request_id)
