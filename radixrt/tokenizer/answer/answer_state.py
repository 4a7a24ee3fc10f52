"""The state of one answer in flight: the scheduler's tokens go in, chunks of text for the api come
out."""

import math
import time
from collections.abc import Callable

import msgspec

from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.constrained.grammar import Unenforced
from radixrt.messages.answers import (
    AnswerChunk,
    AnswerReport,
    DraftCounts,
    FinishReason,
    LogprobColumns,
    PromptInfo,
    PromptProgress,
    draft_totals,
)
from radixrt.messages.cache_explanation import CacheExplanation
from radixrt.messages.ids import pack_ids
from radixrt.messages.prompt_images import images_of
from radixrt.messages.receipts import Receipt
from radixrt.messages.requests import CacheHints, ChatPrompt, GenerateRequest
from radixrt.messages.sequences import SequenceOutput
from radixrt.tokenizer.answer.detokenizer import IncrementalDetokenizer, StopStringFinder
from radixrt.tokenizer.answer.output_parser import OutputParser
from radixrt.tokenizer.answer.value_events import AnswerValues
from radixrt.tokenizer.explain.explainer import Explainer
from radixrt.tokenizer.explain.records import PromptRecord
from radixrt.tokenizer.prompt.kept_turns import AnswerParts
from radixrt.tokenizer.prompt.prompts import EncodedPrompt
from radixrt.tokenizer.vocabulary import Vocabulary

PROGRESS_TOKENS = 64
"""Tokens after which an answer that does not stream reports its progress, so that another engine
could continue it."""


class AnswerState:
    """One answer in flight: its text so far, and the part of it that is not sent yet."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        vocabulary: Vocabulary,
        prompt: EncodedPrompt,
        *,
        prompt_info: PromptInfo | None = None,
        keeps_answer: bool = True,
        record: PromptRecord | None = None,
        explainer: Explainer | None = None,
        unenforced: tuple[Unenforced, ...] = (),
        encode_s: float = 0.0,
        grammar_s: float = 0.0,
        receipt_of: Callable[[list[int]], Receipt] | None = None,
    ) -> None:
        """
        Args:
            index: which of the request's ``n`` answers.
            prompt_info: the prompt to send with the first chunk.
            keeps_answer: the chat's next request should find the tokens of this answer, and repeat
                it as it was written.
            record: remembers the answer, if it is one of a chat.
            explainer: explains the cache misses of the record's prompt, if the request asks for it.
            unenforced: parts of the constraint that the answer is not held to.
            encode_s, grammar_s: durations for its report.
            receipt_of: makes the receipt of the answer's tokens; None: it is not asked for.
        """
        self._receipt_of = receipt_of
        self._receipt_ids: list[int] = []
        """All tokens, if there will be a receipt."""
        self._encode_s, self._grammar_s = encode_s, grammar_s
        self._image_tokens = sum(run.num_tokens for run in prompt.images)
        sampling = request.sampling
        self.request = request
        self.index = index
        self.unenforced = unenforced
        self._vocabulary = vocabulary
        self._prompt = prompt_info
        prompt_ids, chat = prompt.token_ids, request.prompt
        is_chat = isinstance(chat, ChatPrompt)
        self._rendered_chat = prompt.text if is_chat and keeps_answer else None
        self._all_ids: list[int] = []
        """Token ids of the text, where there is a rendered chat."""
        self._turn = turn = prompt.turn if keeps_answer else None
        self._parts = AnswerParts()
        """The parts of an answer that the turn keeps or the record remembers."""
        self._record = record
        self._prepares_next = is_chat and index == 0 and request.options.prepares_next_turn
        self._keeps_parts = (
            turn is not None or bool(record and record.layout) or self._prepares_next
        )
        self._explainer = explainer
        self._explanation: CacheExplanation | None = None
        self._written: str | None = None
        """The complete answer as generated, if it is kept."""
        self._prompt_ids = prompt_ids if sampling.prompt_logprobs is not None else []
        self._detokenizer = IncrementalDetokenizer(
            vocabulary.backend,
            vocabulary.special_ids - OutputParser.tag_ids(request, vocabulary),
            sampling.skip_special_tokens,
            () if isinstance(chat, ChatPrompt) and not chat.continue_final_message else prompt_ids,
        )
        self._stops = StopStringFinder(sampling.stop, sampling.include_stop_str_in_output)
        self._parser = OutputParser.for_request(request, vocabulary, prompt_ids)
        self._values = AnswerValues(request, validated=not unenforced)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs = LogprobColumns()
        self._prompt_logprobs = LogprobColumns()
        self._log_kept_masses: list[float] = []
        if self._prompt_ids and sampling.prompt_logprobs_start == 0:
            self._prompt_logprobs.add(self._prompt_ids[:1], [math.nan])
        self._vector = b""
        self._num_tokens = 0
        self._num_repeated = 0
        """Tokens that come a second time, after a takeover."""
        self._num_reported = 0
        """Tokens of which the client knows."""
        self._report_at = 1
        """Number of tokens at which an answer that does not stream reports its progress."""
        self._drafts: DraftCounts = {}
        """Until now, if there are stop strings."""
        self._processed = -1
        """Tokens of the prompt of whose computation the client knows."""
        self._sent_at = time.monotonic()
        self._report = AnswerReport(prompt_tokens=len(prompt_ids))

    @property
    def finished(self) -> bool:
        return self._report.finish_reason is not None

    def resume(self, token_ids: list[int], num_repeated: int) -> None:
        """Take in the tokens that the client has from another engine; their text is not sent again.

        Args:
            num_repeated: of them, at their end, that this engine generates again.
        """
        self.absorb(SequenceOutput(token_ids))
        self.take_chunk()
        self._num_repeated = num_repeated
        self._num_reported, self._report_at = self._num_tokens, self._num_tokens + 1

    def absorb(self, output: SequenceOutput) -> None:
        """Take in new tokens; afterwards ``finished`` tells whether the answer is complete."""
        if self._num_repeated and output.token_ids:
            output = msgspec.structs.replace(
                output, token_ids=output.token_ids[1:], logprobs=output.logprobs[1:]
            )
            self._num_repeated -= 1
        self._report = output.started or self._report
        self._vector = output.vector
        _, accepted_before = draft_totals(self._drafts)
        self._drafts = output.drafts or self._drafts
        if output.cache_facts is not None and self._record and self._explainer:
            with_texts = self.request.options.cache_hints.explain_texts
            self._explanation = self._explainer.explain(
                self._record, output.cache_facts, with_texts
            )
        for row in output.prompt_logprobs:
            self._prompt_logprobs.add_packed(row.token_ids, row.logprobs)
        end = output.finished
        hidden_stop = end is not None and end.finish_reason == "stop" and not self._shows_stop_token
        for position, token_id in enumerate(output.token_ids):
            is_last = position == len(output.token_ids) - 1
            self._num_tokens += 1
            self._token_ids.append(token_id)
            if self._receipt_of is not None:
                self._receipt_ids.append(token_id)
            if position < len(output.logprobs):
                row = output.logprobs[position]
                if row.token_ids:
                    self._logprobs.add_packed(row.token_ids, row.logprobs)
                if row.log_kept_mass is not None:
                    self._log_kept_masses.append(row.log_kept_mass)
            if not (hidden_stop and is_last):
                if self._rendered_chat is not None:
                    self._all_ids.append(token_id)
                self._add_text(self._detokenizer.push(token_id), token_id)
            if self.finished:  # at a stop string; further tokens of the engine are dropped
                self._count_drafts(accepted_before + position + 1)
                return
        if end is not None:
            self._finish(end)

    def abort(self) -> None:
        """End the answer where it is."""
        self._flush_text()
        self._end_here("abort", None)

    def progress_chunk(self, progress: PromptProgress) -> AnswerChunk | None:
        """The progress of the prompt, of the first answer alone: the others find its KV. None: it
        is no further than the last one, as after a retraction."""
        if self.index or self._num_tokens or progress.processed <= self._processed:
            return None
        self._processed = progress.processed
        request_id = self.request.request_id
        return AnswerChunk(
            request_id=request_id, index=0, text="", token_ids=b"", progress=progress
        )

    def take_chunk(self) -> AnswerChunk | None:
        """The next chunk: all that is new, if the request streams; else now and then the new
        tokens, and the whole answer at its end."""
        if not self.finished and not (self.request.stream and self._num_tokens):
            return self._progress() if self._num_tokens >= self._report_at else None
        text = "".join(self._text)
        reasoning, text, tool_calls = self._parser.split(text, is_last=self.finished)
        if self._keeps_parts:
            self._parts.add(text, reasoning, tool_calls)
        if self._turn is not None and self._written is not None:
            self._turn.keep(self._written, self._parts)
        if self._record is not None and self._keeps_parts and self.finished:
            self._record.add_answer(self._parts)
        self._report = msgspec.structs.replace(
            self._report,
            output_tokens=self._num_tokens,
            replayed_tokens=min(self._report.replayed_tokens, self._num_tokens),
            image_tokens=self._image_tokens,
            reasoning_tokens=self._parser.num_reasoning_tokens,
            encode_s=self._encode_s,
            grammar_s=self._grammar_s,
            unenforced=self.unenforced if self.finished else (),
            cache_explanation=self._explanation if self.finished else None,
        )
        chunk = AnswerChunk(
            request_id=self.request.request_id,
            index=self.index,
            text=text,
            token_ids=pack_ids(self._token_ids),
            tool_calls=tool_calls,
            values=self._values.push(text, tool_calls, is_last=self.finished),
            reasoning=reasoning,
            logprobs=(
                None
                if self.request.sampling.logprobs is None
                else self._logprobs.take(self._vocabulary.token_bytes)
            ),
            log_kept_masses=self._log_kept_masses,
            receipt=self._receipt(),
            vector=self._vector,
            prompt=self._take_prompt(),
            report=self._report,
        )
        self._text, self._token_ids, self._log_kept_masses = [], [], []
        return chunk

    def next_turn(self) -> GenerateRequest | None:
        """A request that computes the beginning of the chat's next turn ahead: the messages with
        this answer, as the template will write them, without its reasoning. None: it is not
        asked for, the answer is not whole, or the chat has images."""
        chat = self.request.prompt
        is_whole = self._report.finish_reason in ("stop", "length")
        if not (self._prepares_next and is_whole and isinstance(chat, ChatPrompt)):
            return None
        if images_of(chat):  # of such a chat no tokens are settled, see SettledEncoder
            return None
        if chat.continue_final_message or (answer := self._parts.as_message()) is None:
            return None
        options = self.request.options
        options = msgspec.structs.replace(
            options,
            sampling=PREFILL_ONLY,
            idle="expected",
            prepares_next_turn=False,
            shares_answers=False,
            progress=False,
            deadline=None,
            cache_hints=CacheHints(session=options.cache_hints.session),
        )
        return GenerateRequest(
            request_id=f"next turn of {self.request.request_id}",
            prompt=msgspec.structs.replace(chat, messages=[*chat.messages, answer]),
            options=options,
            growth="messages",
        )

    def _receipt(self) -> Receipt | None:
        is_whole = self._report.finish_reason in ("stop", "length")
        return self._receipt_of(self._receipt_ids) if self._receipt_of and is_whole else None

    def _progress(self) -> AnswerChunk:
        """The new tokens of an answer that does not stream. Another engine would not know the
        log-probabilities of these tokens, so an answer with them would begin again."""
        self._report_at = self._num_tokens + PROGRESS_TOKENS
        sampling = self.request.sampling
        new = self._token_ids[self._num_reported :]
        wants_logits = sampling.logprobs is not None or sampling.kept_mass
        if wants_logits or sampling.prompt_logprobs is not None:
            new = []
        self._num_reported += len(new)
        return AnswerChunk(
            request_id=self.request.request_id,
            index=self.index,
            text="",
            token_ids=pack_ids(new),
            report=self._report,
        )

    @property
    def _shows_stop_token(self) -> bool:
        return self.request.sampling.include_stop_str_in_output

    def _add_text(self, text: str, token_id: int | None = None) -> None:
        self._parser.watch(text, token_id)
        if not text:
            return
        if self._num_tokens < self.request.sampling.min_tokens:
            self._text.append(text)
            return
        certain, stop = self._stops.push(text)
        self._text.append(certain)
        if stop is not None:
            self._end_here("stop", stop)

    def _flush_text(self) -> None:
        self._add_text(self._detokenizer.flush())
        self._text.append(self._stops.flush())

    def _finish(self, end: AnswerReport) -> None:
        """The scheduler has ended the sequence."""
        self._flush_text()
        if self.finished:  # the last bytes completed a stop string
            self._count_drafts(self._num_tokens)
            return
        self._report = end
        if end.finish_reason == "stop":
            self._parser.complete()
        if self._rendered_chat is not None:
            self._keep_tokens(self._rendered_chat)

    def _end_here(self, reason: FinishReason, stop: str | None) -> None:
        """The answer ends at a stop string, or because its client has left: the scheduler did not
        end it."""
        self._report = msgspec.structs.replace(
            self._report,
            finish_reason=reason,
            stop_reason=stop,
            total_s=time.monotonic() - self._sent_at,
        )

    def _count_drafts(self, most: int) -> None:
        """Report the drafts of an answer that ended at a stop string, with at most so many tokens
        of them in it."""
        drafted, accepted = draft_totals(self._drafts)
        accepted = min(accepted, most)
        self._report = msgspec.structs.replace(
            self._report,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=drafted - accepted,
            drafts=self._drafts,
        )

    def _keep_tokens(self, rendered_chat: str) -> None:
        """Let the chat's next request find this answer's tokens, unless some left no text."""
        ids = self._all_ids
        if ids and self._vocabulary.special_ids.isdisjoint(ids):
            self._written = self._vocabulary.decode(ids)
            root = self.request.options.root
            self._vocabulary.segments.answers.keep(rendered_chat, self._written, ids, root)

    def _take_prompt(self) -> PromptInfo | None:
        prompt, self._prompt = self._prompt, None
        if prompt is None or not self._prompt_ids:
            return prompt
        logprobs = self._prompt_logprobs.take(self._vocabulary.token_bytes)
        return msgspec.structs.replace(prompt, logprobs=logprobs)
