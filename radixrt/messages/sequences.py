"""What do tokenizer process and scheduler tell each other of sequences? Each is one answer."""

import msgspec

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.answers import FinishReason
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message
from radixrt.messages.requests import NO_HINTS, CacheHints


class SequenceRequest(Message, frozen=True, kw_only=True):
    """One answer to be generated. Valid by construction: the tokenizer has checked it."""

    seq_id: int
    token_ids: PackedIds
    sampling: SamplingParams
    """With ``max_tokens`` and ``seed`` filled in."""
    cache_salt: str = ""
    priority: int = 0
    cache_hints: CacheHints = NO_HINTS
    deadline: float | None = None
    num_output: int = 0
    """How many of token_ids, at their end, are an answer begun before: max_tokens and penalties count them."""
    grammar: GrammarUse | None = None
    """Names a grammar that was sent before (:mod:`radixrt.messages.grammars`)."""


class ReleaseSequences(Message, frozen=True):
    """Nobody wants more tokens of these. Unknown ids are ignored."""

    seq_ids: PackedIds
    complete: bool = False
    """The answers are: a stop string was found. Else the client is gone, or the request has failed."""


class SequenceStarted(msgspec.Struct, frozen=True, array_like=True):
    """Travels with a sequence's first token."""

    seq_id: int
    cached_tokens: int
    queued_s: float
    prefill_s: float
    cache_write_tokens: int = 0


class SequenceFinished(msgspec.Struct, frozen=True, array_like=True):
    """Travels with a sequence's last token."""

    seq_id: int
    reason: FinishReason
    stop_token: int | None
    """The stop or end-of-sequence token that ended it; it is among the tokens."""
    total_s: float


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
    started: list[SequenceStarted] = []
    finished: list[SequenceFinished] = []
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
    grammar_lost: bool = False
    """The scheduler does not have its grammar: no rank can use it until it is dropped and sent again."""
