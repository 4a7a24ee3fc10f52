"""The messages between tokenizer process and scheduler. A sequence is one answer."""

import msgspec

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.grammar import Grammar
from radixrt.messages.answers import AnswerReport
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
    """How many of token_ids, at their end, are an answer begun before: max_tokens and penalties count them."""
    constraint: "Constraint | None" = None

    @property
    def sampling(self) -> SamplingParams:
        """Of the options."""
        return self.options.sampling


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sequence's answer is held to."""

    grammar: Grammar
    begin_after: PackedIds = b""
    """The grammar begins after the first occurrence of these tokens in the answer; none: at once. Until then
    any token may come but one that ends the answer."""
    excluded: list[PackedIds] = []
    """Token sequences that must not come, each from the point where this request goes on (``num_output``)."""


class ReleaseSequences(Message, frozen=True):
    """Nobody wants more tokens of these. Unknown ids are ignored."""

    seq_ids: PackedIds
    complete: bool = False
    """The answers are: a stop string was found. Else the client is gone, or the request has failed."""


class LogprobRow(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the likeliest, descending."""

    owner: int
    """A slot on the way from the worker, a sequence id on the way to the tokenizer."""
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
    logprobs: list[LogprobRow] = []
    """For sequences that asked, one a new token, in order."""
    prompt_logprobs: list[LogprobRow] = []
    """In order of position, from the prompt's second token on."""
    refused: list["SequenceRefused"] = []
    """Sequences that were not taken, or that the model can't go on with."""


class SequenceRefused(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler can't take or go on with this sequence; see RequestFailed."""

    seq_id: int
    message: str
    status: int
    retry_after_s: int | None = None
