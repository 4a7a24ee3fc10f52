"""Which answers are being generated, and who is told what of them?

The scheduler's tokens come in, chunks for the api go out. Values that no grammar covers are validated on the
way, and an answer in which one is wrong goes on from an earlier point, as a new sequence.
"""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable

import msgspec

from radixrt.base.errors import RequestError, unexpected_error
from radixrt.constrained.checks.checked_answer import DueCheck
from radixrt.constrained.checks.span_error import SpanError
from radixrt.constrained.grammar import Grammar, GrammarKey
from radixrt.messages.answers import AnswerBatch, AnswerChunk, RequestFailed
from radixrt.messages.ids import pack_ids
from radixrt.messages.sequences import (
    ReleaseSequences,
    SequenceRefused,
    SequenceRequest,
    TokenBatch,
)
from radixrt.tokenizer.answer.answers import Answer, SequenceNews, news_by_sequence
from radixrt.tokenizer.constraints.checked_sequence import CheckedSequence
from radixrt.tokenizer.constraints.manager import ConstraintManager
from radixrt.tokenizer.constraints.sent_grammars import SentGrammars

log = logging.getLogger(__name__)

Send = Callable[[msgspec.Struct], None]


@dataclasses.dataclass(eq=False)
class _UnderWay:
    """One answer."""

    seq_id: int
    answer: Answer
    checked: CheckedSequence | None
    """What holds it back until its values are validated."""
    grammar_key: GrammarKey | None
    """Of the grammar that it uses."""

    @property
    def request_id(self) -> str:
        return self.answer.request.request_id


class AnswersUnderWay:
    """All answers of this engine that have not finished."""

    def __init__(self, constraints: ConstraintManager, to_api: Send, to_scheduler: Send) -> None:
        self._constraints = constraints
        self._to_api = to_api
        self._to_scheduler = to_scheduler
        self._grammars = SentGrammars(to_scheduler)
        self._by_seq_id: dict[int, _UnderWay] = {}
        self._seq_ids_of: dict[str, set[int]] = {}
        """Unfinished answers of each request; empty while its prompt is being encoded."""
        self._seq_ids = itertools.count()
        self._validating: set[asyncio.Task[None]] = set()

    def new_seq_id(self) -> int:
        return next(self._seq_ids) & 0x7FFFFFFF

    def expect(self, request_id: str) -> None:
        """A request has come whose answers will begin."""
        self._seq_ids_of[request_id] = set()

    def begin(
        self,
        sequence: SequenceRequest,
        answer: Answer,
        checked: CheckedSequence | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """Hand one answer of a request that is expected to the scheduler, with the grammar that it uses."""
        key = None if grammar is None else grammar.key
        if grammar is not None:
            self._grammars.use(grammar)
        self._add(_UnderWay(sequence.seq_id, answer, checked, key))
        self._to_scheduler(sequence)

    def abort(self, request_id: str) -> None:
        """End a request's answers where they are; one that is not under way is ignored."""
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
        """Drop a request, all its answers, and say why."""
        self._drop(request_id)
        self._to_api(failure(request_id, error))

    def absorb(self, batch: TokenBatch) -> None:
        """Turn a step's tokens into text and tell the api. Ids of dropped sequences are ignored."""
        chunks: list[AnswerChunk | None] = []
        for seq_id, news in news_by_sequence(batch).items():
            under_way = self._by_seq_id.get(seq_id)
            if under_way is None:
                continue
            try:
                chunks.append(self._absorb(under_way, news))
            except Exception as error:
                self.fail(under_way.request_id, error)
        self._send_chunks(chunks)
        for refused in batch.refused:
            self._refuse(refused)

    def _refuse(self, refused: SequenceRefused) -> None:
        """The scheduler can't go on with a sequence."""
        under_way = self._by_seq_id.get(refused.seq_id)
        if under_way is not None:
            if refused.grammar_lost and under_way.grammar_key is not None:
                self._grammars.lost(under_way.grammar_key)
            error = RequestError(
                refused.message, status=refused.status, retry_after_s=refused.retry_after_s
            )
            self.fail(under_way.request_id, error)

    def _absorb(self, under_way: _UnderWay, news: SequenceNews) -> AnswerChunk | None:
        if under_way.checked is None:
            return self._tell(under_way, news, is_over=news.finished is not None)
        under_way.checked.absorb(news)
        return self._tell_checked(under_way, under_way.checked)

    def _tell(
        self, under_way: _UnderWay, news: SequenceNews, *, is_over: bool
    ) -> AnswerChunk | None:
        """Let an answer take in what may be told. ``is_over``: the scheduler has ended the sequence."""
        answer = under_way.answer
        answer.absorb(news)
        chunk = answer.take_chunk()
        if answer.finished:
            self._remove(under_way)
            if not self._seq_ids_of[under_way.request_id]:
                del self._seq_ids_of[under_way.request_id]
            if not is_over:
                self._release({under_way.seq_id}, complete=True)
            self._release_grammar(under_way)
        return chunk

    # ------------------------------------------------------------ values that are validated

    def _tell_checked(self, under_way: _UnderWay, checked: CheckedSequence) -> AnswerChunk | None:
        """Have validated what is due, and tell what no verdict can take back."""
        for due in checked.due():
            task = asyncio.get_running_loop().create_task(self._validate(under_way, checked, due))
            self._validating.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._validating.discard)
        news = checked.take_news()
        if news is None:
            return None
        answer = under_way.answer
        if checked.violation is not None and not answer.unenforced:
            constraint = answer.request.constraint
            raise self._constraints.report_violation(constraint, checked.text, checked.violation)
        answer.violation, answer.retries = checked.violation, checked.retries
        return self._tell(under_way, news, is_over=checked.is_over)

    async def _validate(
        self, under_way: _UnderWay, checked: CheckedSequence, due: DueCheck
    ) -> None:
        try:
            errors = await self._constraints.validate(due)
            if self._is_here(under_way):
                self._take_verdict(under_way, checked, due, errors)
        except Exception as error:
            if self._is_here(under_way):
                self.fail(under_way.request_id, error)

    def _is_here(self, under_way: _UnderWay) -> bool:
        return self._by_seq_id.get(under_way.seq_id) is under_way

    def _take_verdict(
        self,
        under_way: _UnderWay,
        checked: CheckedSequence,
        due: DueCheck,
        errors: list[SpanError],
    ) -> None:
        """Tell more of an answer, or let it go on from an earlier point."""
        again = self._constraints.verdict(checked, due, errors, self.new_seq_id())
        if again is not None:
            self._remove(under_way)
            self._release({under_way.seq_id})
            under_way.seq_id = again.seq_id
            self._add(under_way)
            self._to_scheduler(again)
        self._send_chunks([self._tell_checked(under_way, checked)])

    # ------------------------------------------------------------ bookkeeping

    def _add(self, under_way: _UnderWay) -> None:
        self._by_seq_id[under_way.seq_id] = under_way
        self._seq_ids_of[under_way.request_id].add(under_way.seq_id)

    def _remove(self, under_way: _UnderWay) -> None:
        del self._by_seq_id[under_way.seq_id]
        self._seq_ids_of[under_way.request_id].discard(under_way.seq_id)

    def _drop(self, request_id: str) -> None:
        seq_ids = self._seq_ids_of.pop(request_id, set())
        dropped = [self._by_seq_id.pop(seq_id) for seq_id in seq_ids]
        self._release(seq_ids)
        for under_way in dropped:
            self._release_grammar(under_way)

    def _release(self, seq_ids: set[int], *, complete: bool = False) -> None:
        if seq_ids:
            self._to_scheduler(ReleaseSequences(pack_ids(sorted(seq_ids)), complete))

    def _release_grammar(self, under_way: _UnderWay) -> None:
        """The answer is over, and the scheduler knows it or was told before."""
        if under_way.grammar_key is not None:
            self._grammars.release(under_way.grammar_key)

    def _send_chunks(self, chunks: list[AnswerChunk | None]) -> None:
        if told := [chunk for chunk in chunks if chunk is not None]:
            self._to_api(AnswerBatch(told))


def failure(request_id: str, error: Exception) -> RequestFailed:
    """How an error is told to the api; one that is no fault of the request is logged."""
    if not isinstance(error, RequestError):
        log.error("Request %s failed in the tokenizer.", request_id, exc_info=error)
        error = unexpected_error()
    return RequestFailed.of(error, request_id)
