"""The messages between tokenizer process and scheduler. A sequence is one answer."""

import msgspec

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.answers import AnswerReport
from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message
from radixrt.messages.requests import RequestOptions


class SequenceRequest(Message, frozen=True, kw_only=True):
    """One answer to be generated. Valid by construction: the tokenizer has checked it."""

    seq_id: int
    token_ids: PackedIds
    options: RequestOptions
    """Of the request, with ``max_tokens`` and ``seed`` of this answer filled in."""
    num_output: int = 0
    """Number of token_ids, at their end, that an answer has generated before: max_tokens and penalties count them."""
    second_at: int = 0
    """Of a pair of texts: position of the second one's first token, for models that tell them apart."""
    grammar: GrammarUse | None = None
    """Names a grammar that was sent before (:mod:`radixrt.messages.grammars`)."""
    prediction: PackedIds = b""
    """The tokens of the answer as the client expects it."""
    group: str = ""
    """Shared by the answers of one HTTP request, which are accepted or refused as a whole; never used twice."""
    group_size: int = 1
    """Of these, those that are sent without a wait for the end of another."""
    has_begun: bool = False
    """The client has tokens of the answer, or it is generated once more: it is not refused for its wait."""

    @property
    def sampling(self) -> SamplingParams:
        """Of the options."""
        return self.options.sampling


class ReleaseSequences(Message, frozen=True):
    """Drop sequences that need no more tokens. Unknown ids are ignored."""

    seq_ids: PackedIds
    complete: bool = False
    """True: a stop string has ended the answers. False: the client is gone, or the request has failed."""


class SequenceLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position of a sequence: the chosen token first, then the likeliest, descending."""

    seq_id: int
    token_ids: PackedIds
    logprobs: list[float]


class TokenBatch(Message, frozen=True, kw_only=True):
    """The new tokens of one step, in columns; a sequence with several tokens has several entries."""

    seq_ids: PackedIds = b""
    token_ids: PackedIds = b""
    started: dict[int, AnswerReport] = {}
    """By sequence id, with a sequence's first token."""
    finished: dict[int, AnswerReport] = {}
    """By sequence id, with a sequence's last token. A stop token that ended the answer is among the tokens."""
    cache_facts: dict[int, CacheFacts] = {}
    """By sequence id, with the first token of a sequence whose client wants its cache misses explained."""
    logprobs: list[SequenceLogprobs] = []
    """One a new token, in order, of the sequences with ``logprobs``."""
    prompt_logprobs: list[SequenceLogprobs] = []
    """In order of position, from the prompt's second token on."""
    drafts: dict[int, tuple[int, int]] = {}
    """By sequence id, of the sequences with stop strings of which a draft was verified: draft tokens so far, and of these those
    that were accepted. The tokenizer process finds the end of their answers, and reports them."""
    vectors: dict[int, bytes] = {}
    """By sequence id, with the end of a sequence that asks for numbers: as 32-bit floats."""
    refused: list["SequenceRefused"] = []
    """Sequences that were not accepted, or that the model can't go on with."""


class SequenceRefused(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler refuses a sequence, or has to drop it; see RequestFailed for the fields."""

    seq_id: int
    message: str
    status: int
    retry_after_s: int | None = None
    grammar_lost: bool = False
    """The scheduler does not have its grammar: no rank can use it until it is dropped and sent again."""
