"""What is known of each answer under way, and what of it can be told to the client?"""

import dataclasses
import time
from collections.abc import Iterator

import msgspec

from radixrt.constrained.grammar import Unenforced
from radixrt.messages.answers import (
    AnswerChunk,
    AnswerTimes,
    FinishReason,
    PromptInfo,
    TokenLogprob,
)
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import GenerateRequest
from radixrt.messages.sequences import LogprobRow, SequenceFinished, SequenceStarted, TokenBatch
from radixrt.tokenizer.answer.detokenizer import IncrementalDetokenizer
from radixrt.tokenizer.answer.parts import AnswerParts
from radixrt.tokenizer.answer.stop_strings import StopStringFinder
from radixrt.tokenizer.vocabulary import Vocabulary


@dataclasses.dataclass
class SequenceNews:
    """What one TokenBatch says about one sequence."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[LogprobRow] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = dataclasses.field(default_factory=list)
    started: SequenceStarted | None = None
    finished: SequenceFinished | None = None


def news_by_sequence(batch: TokenBatch) -> dict[int, SequenceNews]:
    """Turn the columns of a batch into one record a sequence."""
    news: dict[int, SequenceNews] = {}
    seq_ids, token_ids = unpack_ids(batch.seq_ids).tolist(), unpack_ids(batch.token_ids).tolist()
    for seq_id, token_id in zip(seq_ids, token_ids, strict=True):
        news.setdefault(seq_id, SequenceNews()).token_ids.append(token_id)
    for started in batch.started:
        news.setdefault(started.seq_id, SequenceNews()).started = started
    for finished in batch.finished:
        news.setdefault(finished.seq_id, SequenceNews()).finished = finished
    for row in batch.logprobs:
        news.setdefault(row.owner, SequenceNews()).logprobs.append(row)
    for row in batch.prompt_logprobs:
        news.setdefault(row.owner, SequenceNews()).prompt_logprobs.append(row)
    return news


class Answer:
    """One answer under way: its text so far, and what has not been told yet."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        vocabulary: Vocabulary,
        prompt: PromptInfo,
        prompt_ids: list[int],
        eos_token_ids: tuple[int, ...],
        continues_prompt: bool,
        conversation: str | None = None,
    ) -> None:
        """
        Args:
            conversation: the prompt as text, if its next turn should find the tokens of this answer.
        """
        sampling = request.sampling
        self.request = request
        self.index = index
        self._vocabulary = vocabulary
        self._prompt: PromptInfo | None = prompt
        self._conversation = conversation
        self._all_ids: list[int] = []
        """Of the text, where there is a conversation."""
        self._prompt_ids = prompt_ids if sampling.prompt_logprobs is not None else []
        self._eos_token_ids = eos_token_ids
        self._detokenizer = IncrementalDetokenizer(
            vocabulary.backend,
            vocabulary.special_ids - AnswerParts.tag_ids(request, vocabulary),
            sampling.skip_special_tokens,
            prompt_ids if continues_prompt else (),
        )
        self._stops = StopStringFinder(sampling.stop, sampling.include_stop_str_in_output)
        self._parts = AnswerParts.of(request, vocabulary, prompt_ids)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_rows: list[LogprobRow] = []
        self._num_tokens = 0
        self._started: SequenceStarted | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._sent_at = time.monotonic()
        self.retries = 0
        self.unenforced: tuple[Unenforced, ...] = ()
        self.violation: str | None = None
        self._total_s: float | None = None

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None

    def absorb(self, news: SequenceNews) -> None:
        """Take in new tokens; afterwards ``finished`` tells whether the answer is complete."""
        self._started = news.started or self._started
        self._prompt_rows += news.prompt_logprobs
        end = news.finished
        hidden_stop = end is not None and end.stop_token is not None and not self._shows_stop_token
        for position, token_id in enumerate(news.token_ids):
            is_last = position == len(news.token_ids) - 1
            self._num_tokens += 1
            self._token_ids.append(token_id)
            if position < len(news.logprobs):
                self._logprobs.append(self._token_logprob(news.logprobs[position]))
            if not (hidden_stop and is_last):
                if self._conversation is not None:
                    self._all_ids.append(token_id)
                self._add_text(self._detokenizer.push(token_id), token_id)
            if self.finished:  # at a stop string; what the engine computed beyond it is dropped
                return
        if end is not None:
            self._finish(end)

    def abort(self) -> None:
        """End the answer where it is."""
        self._flush_text()
        self._finish_reason = "abort"

    def take_chunk(self) -> AnswerChunk | None:
        """What is to be told now: all that is new, if the request streams; else the whole, at the end."""
        if not self.finished and not (self.request.stream and self._num_tokens):
            return None
        text = "".join(self._text)
        reasoning, text, tool_calls = self._parts.split(text, is_last=self.finished)
        chunk = AnswerChunk(
            request_id=self.request.request_id,
            index=self.index,
            text=text,
            token_ids=pack_ids(self._token_ids),
            tool_calls=tool_calls,
            reasoning=reasoning,
            logprobs=self._logprobs if self.request.sampling.logprobs is not None else None,
            prompt=self._take_prompt(),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_output_tokens=self._num_tokens,
            cached_tokens=self._started.cached_tokens if self._started else 0,
            cache_write_tokens=self._started.cache_write_tokens if self._started else 0,
            times=self._times() if self.finished else None,
            retries=self.retries,
            unenforced=self.unenforced if self.finished else (),
            violation=self.violation if self.finished else None,
        )
        self._text, self._token_ids, self._logprobs = [], [], []
        return chunk

    @property
    def _shows_stop_token(self) -> bool:
        return self.request.sampling.include_stop_str_in_output

    def _add_text(self, text: str, token_id: int | None = None) -> None:
        self._parts.watch(text, token_id)
        if not text:
            return
        if self._num_tokens < self.request.sampling.min_tokens:
            self._text.append(text)
            return
        certain, stop = self._stops.push(text)
        self._text.append(certain)
        if stop is not None:
            self._finish_reason, self._stop_reason = "stop", stop

    def _flush_text(self) -> None:
        self._add_text(self._detokenizer.flush())
        self._text.append(self._stops.flush())

    def _finish(self, end: SequenceFinished) -> None:
        self._flush_text()
        if self.finished:  # the last bytes completed a stop string
            return
        self._total_s = end.total_s
        self._finish_reason = end.reason
        if end.stop_token is not None and not self._is_natural_end(end.stop_token):
            self._stop_reason = end.stop_token
        if self._conversation is not None:
            self._keep_tokens(self._conversation)

    def _keep_tokens(self, conversation: str) -> None:
        """Let the next turn of the conversation find this answer's tokens, unless some left no text."""
        ids = self._all_ids
        if ids and self._vocabulary.special_ids.isdisjoint(ids):
            text = self._vocabulary.decode(ids)
            salt = self.request.cache_salt
            self._vocabulary.segments.answers.keep(conversation, text, ids, salt)

    def _is_natural_end(self, token_id: int) -> bool:
        asked_for = token_id in self.request.sampling.stop_token_ids
        return token_id in self._eos_token_ids and not asked_for

    def _times(self) -> AnswerTimes:
        queued_s = self._started.queued_s if self._started else 0.0
        prefill_s = self._started.prefill_s if self._started else 0.0
        total_s = self._total_s  # None where the answer ended here, at a stop string or an abort
        if total_s is None:
            total_s = time.monotonic() - self._sent_at
        return AnswerTimes(queued_s=queued_s, prefill_s=prefill_s, total_s=total_s)

    def _take_prompt(self) -> PromptInfo | None:
        prompt, self._prompt = self._prompt, None
        if prompt is None or not self._prompt_ids:
            return prompt
        return msgspec.structs.replace(prompt, logprobs=list(self._prompt_logprobs()))

    def _prompt_logprobs(self) -> Iterator[TokenLogprob]:
        if self.request.sampling.prompt_logprobs_start == 0:
            yield self._vocabulary.token_logprob(self._prompt_ids[0], None, [])
        for row in self._prompt_rows:
            yield self._token_logprob(row)

    def _token_logprob(self, row: LogprobRow) -> TokenLogprob:
        """The chosen token is first in a row; the likeliest follow."""
        make = self._vocabulary.token_logprob
        ids = unpack_ids(row.token_ids).tolist()
        top = [make(i, p, []) for i, p in zip(ids[1:], row.logprobs[1:], strict=True)]
        return make(ids[0], row.logprobs[0], top)
