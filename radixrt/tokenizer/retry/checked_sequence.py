"""Holds tokens of a constrained answer back until they are validated, and continues the answer
after a failed value.

It lies between the scheduler's messages and the
:class:`~radixrt.tokenizer.answer.answer_state.AnswerState`, which receives only tokens that no
check can roll back any more. A rollback requests a new sequence. Its prompt is the old prompt with
the kept tokens, and the radix tree holds their KV.
"""

import time
from typing import Any

import msgspec

from radixrt.base.tags import GrammarStart
from radixrt.constrained.grammar import CheckedTags, Checks, SpanCheck, SpanError
from radixrt.messages.answers import AnswerReport
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.sequences import SequenceOutput, SequenceRequest
from radixrt.tokenizer.answer.detokenizer import IncrementalDetokenizer
from radixrt.tokenizer.answer_sampling import answer_seed
from radixrt.tokenizer.retry.checked_answer import (
    MAX_FAILURES,
    CheckedAnswer,
    DueCheck,
    Rewind,
)
from radixrt.tokenizer.retry.exclusions import TokenTexts
from radixrt.tokenizer.vocabulary import Vocabulary

FINAL_CHECK = -1
"""Id of the validation of a whole answer that no failure takes back."""


class CheckedSequence:
    """The tokens of one answer on their way to the client, some of them held back."""

    def __init__(
        self,
        request: SequenceRequest,
        checks: Checks,
        vocabulary: Vocabulary,
        token_texts: TokenTexts,
        *,
        max_failures: int = MAX_FAILURES,
        final_schema: Any = None,
    ) -> None:
        """
        Args:
            request: as it was sent to the scheduler; it names a grammar.
            checks: of the answer's values; may be empty.
            max_failures: failures of one value before the request fails.
            final_schema: to validate the finished answer against, only to know.
        """
        assert request.grammar is not None
        self.seq_id = request.seq_id
        self.is_over = False
        """The scheduler has ended the sequence."""
        self._request = request
        self._grammar = request.grammar
        self._vocabulary = vocabulary
        self._final: SpanCheck | None = None
        if final_schema is not None:
            self._final = SpanCheck(path=(), schema=final_schema, pointer="", keywords=())
        self._checked = CheckedAnswer(
            checks, max_failures=max_failures, tokens_along=token_texts.along
        )
        self._checks_tags = isinstance(checks, CheckedTags)
        """Control tokens may be parts of tags."""
        self._detokenizer = self._new_detokenizer()
        self._begun = time.monotonic()
        used = self._grammar
        tags = map(unpack_ids, (used.opening, used.begin_after, used.then_after))
        self._start = GrammarStart(*(vocabulary.tag_symbols(tag.tolist()) for tag in tags))
        self._tokens: list[int] = []
        self._num_before = 0
        """Tokens before the grammar began."""
        self._held = SequenceOutput()
        """What came and was not passed on."""
        self._started: AnswerReport | None = None
        self._num_delivered = 0
        self._awaits_final = False
        self.violation: str | None = None
        """How the finished answer breaks the final schema."""

    @property
    def retries(self) -> int:
        return self._checked.retries

    @property
    def text(self) -> str:
        """The text since the grammar began."""
        return self._checked.text

    # ------------------------------------------------------------ tokens

    def absorb(self, output: SequenceOutput) -> None:
        """Take in new tokens, and the end if it has come. Raises ValueError if the grammar does not
        allow the text: a bug."""
        self._started = output.started or self._started
        self._held.extend(output)
        end = output.finished
        ends_with_stop = end is not None and end.finish_reason == "stop"
        for position, token in enumerate(output.token_ids):
            self._push(token, is_stop=ends_with_stop and position == len(output.token_ids) - 1)
        if end is not None:
            self._finish(end)

    def resume(self, token_ids: list[int], retries: int) -> None:
        """Take in the tokens that the client has from another engine, which had validated them.

        Args:
            retries: of the answer when the last of them was delivered.
        """
        for token in token_ids:
            self._push(token, is_stop=False)
        self._num_delivered = len(token_ids)
        self._checked.retries = retries

    def _push(self, token: int, *, is_stop: bool) -> None:
        self._tokens.append(token)
        new = [token]
        if not self._start.has_begun:
            self._start.push(self._vocabulary.symbols_of(token))
            if self._start.opened is None:
                return
            if self._start.opened:
                self._num_before = len(self._tokens)
                return
            new = self._tokens  # from the first on, they are the grammar's
        for position, one in enumerate(new, 1):
            is_end = is_stop and position == len(new)
            self._checked.push([one], ["" if is_end else self._detokenizer.push(one)])

    def _finish(self, end: AnswerReport) -> None:
        self.is_over = True
        self._held.finished = msgspec.structs.replace(end, total_s=time.monotonic() - self._begun)
        if self._start.opened is None:  # it was cut off in what may be the opening
            self._num_before = len(self._tokens)
        is_complete = end.finish_reason == "stop" and self._start.has_begun
        was_stopped_by_request = end.stop_reason is not None
        self._checked.finish(cut_off=not is_complete or was_stopped_by_request)
        self._awaits_final = is_complete and self._final is not None

    def take_output(self) -> SequenceOutput | None:
        """What may be passed on now; None: there is nothing."""
        confirmed = self._num_before + self._checked.num_confirmed_tokens - self._num_delivered
        # After a takeover, tokens are delivered before they are validated again.
        confirmed = max(confirmed, 0)
        held = self._held
        settled = self._checked.is_settled and not self._awaits_final
        if not (confirmed or held.prompt_logprobs or (held.finished and settled)):
            return None
        self._held = SequenceOutput(
            token_ids=held.token_ids[confirmed:],
            logprobs=held.logprobs[confirmed:],
            finished=None if settled else held.finished,
        )
        self._num_delivered += confirmed
        return msgspec.structs.replace(
            held,
            token_ids=held.token_ids[:confirmed],
            logprobs=held.logprobs[:confirmed],
            started=self._with_checks(self._started),
            finished=self._with_checks(held.finished) if settled else None,
        )

    def _with_checks(self, report: AnswerReport | None) -> AnswerReport | None:
        """Add the results of the checks to the scheduler's report."""
        if report is None:
            return None
        return msgspec.structs.replace(report, retries=self.retries, violation=self.violation)

    # ------------------------------------------------------------ results of checks

    def due(self) -> list[DueCheck]:
        """Values to be validated."""
        due = self._checked.due()
        if self._awaits_final and self._final is not None and self._checked.is_settled:
            due.append(DueCheck(FINAL_CHECK, self._final, self._checked.text))
            self._final = None
        return due

    def validated(
        self, due: DueCheck, errors: list[SpanError], seq_id: int
    ) -> SequenceRequest | None:
        """Take in the errors of a validator. Returns a new sequence to go on with, ``seq_id``, if a
        value was wrong. Raises RetriesExhausted if the request has to fail."""
        if due.id == FINAL_CHECK:
            self._awaits_final = False
            self.violation = errors[0].message if errors else None
            return None
        if not errors:
            self._checked.passed(due.id)
            return None
        rewind = self._checked.failed(due.id, errors)
        return None if rewind is None else self._go_back(rewind, seq_id)

    def _go_back(self, rewind: Rewind, seq_id: int) -> SequenceRequest:
        kept = self._num_before + rewind.num_output_kept
        for column in (self._held.token_ids, self._held.logprobs):
            del column[kept - self._num_delivered :]
        del self._tokens[kept:]
        self._held.finished = None
        self.seq_id, self.is_over = seq_id, False
        self._detokenizer = self._new_detokenizer()
        for token in self._tokens[self._num_before :]:
            self._detokenizer.push(token)
        first, options, grammar = self._request, self._request.options, self._grammar
        if self._num_before == 0:  # the answer has not opened its reasoning, and can't any more
            grammar = msgspec.structs.replace(grammar, opening=b"", begin_after=b"", then_after=b"")
        seed = answer_seed(options.sampling.seed or 0, rewind.retries)
        sampling = msgspec.structs.replace(options.sampling, seed=seed)
        return msgspec.structs.replace(
            first,
            seq_id=seq_id,
            token_ids=first.token_ids + pack_ids(self._tokens),
            num_output=kept,
            has_begun=True,
            options=msgspec.structs.replace(options, sampling=sampling),
            grammar=msgspec.structs.replace(
                grammar,
                excluded=[pack_ids(path) for path in rewind.excluded],
                excluded_from=kept,
            ),
        )

    def _new_detokenizer(self) -> IncrementalDetokenizer:
        special_ids = self._vocabulary.special_ids
        skips_names = not self._checks_tags
        return IncrementalDetokenizer(self._vocabulary.backend, special_ids, skips_names)
