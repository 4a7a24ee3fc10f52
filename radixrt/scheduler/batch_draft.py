"""Collects the tokens and reports of one step for the tokenizer process."""

from dataclasses import dataclass, field

from radixrt.messages.answers import AnswerReport
from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.ids import pack_ids
from radixrt.messages.sequences import SequenceLogprobs, SequenceRefused, TokenBatch
from radixrt.messages.steps import StepResult
from radixrt.scheduler.steps_in_flight import StepInFlight


@dataclass(slots=True)
class BatchDraft:
    """Collects the results of a step; :class:`radixrt.messages.sequences.TokenBatch` documents the fields."""

    seq_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    started: dict[int, AnswerReport] = field(default_factory=dict)
    finished: dict[int, AnswerReport] = field(default_factory=dict)
    refused: list[SequenceRefused] = field(default_factory=list)
    cache_facts: dict[int, CacheFacts] = field(default_factory=dict)
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SequenceLogprobs] = field(default_factory=list)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)

    def add_logprobs(self, result: StepResult, step: StepInFlight) -> None:
        """Take the log-probabilities that somebody wants and has not got yet."""
        self.prompt_logprobs += [
            SequenceLogprobs(sequence.seq_id, row.token_ids, row.logprobs)
            for row in result.prompt_logprobs
            if (sequence := step.sequences[row.slot]) is not None
            and sequence.wants_prompt_logprob()
        ]
        self.logprobs += [
            SequenceLogprobs(sequence.seq_id, row.token_ids, row.logprobs)
            for row in result.logprobs
            if (sequence := step.sequences[row.slot]) is not None
        ]

    def add_token(self, seq_id: int, token: int) -> None:
        self.seq_ids.append(seq_id)
        self.token_ids.append(token)

    def seal(self) -> TokenBatch:
        """The finished batch."""
        return TokenBatch(
            seq_ids=pack_ids(self.seq_ids),
            token_ids=pack_ids(self.token_ids),
            started=self.started,
            finished=self.finished,
            cache_facts=self.cache_facts,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            drafts=self.drafts,
            vectors=self.vectors,
            refused=self.refused,
        )
