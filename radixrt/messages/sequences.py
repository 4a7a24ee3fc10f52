"""The messages between tokenizer process and scheduler. A sequence is one answer."""

import msgspec

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.answers import AnswerReport, DraftCounts, PromptProgress
from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import PackedIds, TokenIds, unpack_ids
from radixrt.messages.images import ImageRun
from radixrt.messages.message import Message
from radixrt.messages.requests import RequestOptions


class SequenceRequest(Message, frozen=True, kw_only=True):
    """One answer to be generated. Valid by construction: the tokenizer has checked it."""

    seq_id: int
    token_ids: PackedIds
    """The model's."""
    key_ids: PackedIds = b""
    """The ids by which prefixes are compared, in place of the first token_ids; the others stand for
    themselves."""
    images: list[ImageRun] = []
    """The images of the prompt, which were sent before, in order."""
    options: RequestOptions
    """The request's options, with ``max_tokens`` and ``seed`` of this answer filled in."""
    num_output: int = 0
    """Number of token_ids, at their end, that an answer has generated before: max_tokens and
    penalties count them."""
    second_segment_start: int = 0
    """Position of the first token of a pair's second text, for models that tell them apart."""
    messages_end: int = 0
    """Tokens of a chat up to the end of its last message, before the generation prompt; 0: it is
    not known, or no chat."""
    grammar: GrammarUse | None = None
    """Names a grammar that was sent before (:mod:`radixrt.messages.grammars`)."""
    prediction: PackedIds = b""
    """The tokens of the answer as the client expects it."""
    group: str = ""
    """Shared by the answers of one HTTP request, which are accepted or refused as a whole; never
    used twice."""
    group_size: int = 1
    """Sequences of the group that are sent without a wait for the end of another."""
    has_begun: bool = False
    """The client has tokens of the answer, or it is generated once more: it is not refused for its
    wait."""

    @property
    def sampling(self) -> SamplingParams:
        """The options' sampling settings."""
        return self.options.sampling

    def keys(self) -> TokenIds:
        """The ids by which prefixes are compared, one for each of token_ids: [n] int32."""
        return unpack_ids(self.key_ids + self.token_ids[len(self.key_ids) :])


class ReleaseSequences(Message, frozen=True):
    """Drop sequences that need no more tokens. Unknown ids are ignored."""

    seq_ids: PackedIds
    complete: bool = False
    """True: a stop string has ended the answers. False: the client is gone, or the request has
    failed."""


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position of a sequence: the chosen token first, then the likeliest,
    descending."""

    token_ids: PackedIds
    logprobs: list[float]
    log_kept_mass: float | None = None
    """See ``SlotLogprobs``."""


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """The results of one step for one sequence, from the scheduler to the state of its answer."""

    token_ids: list[int] = []
    """New tokens."""
    started: AnswerReport | None = None
    """The report, with the first token."""
    finished: AnswerReport | None = None
    """The report, with the last token. A stop token that ended the answer is among the tokens."""
    cache_facts: CacheFacts | None = None
    """Facts that come with the first token, if the client wants its cache misses explained."""
    logprobs: list[PositionLogprobs] = []
    """One a new token, in order, if the request has ``logprobs`` or ``kept_mass``."""
    prompt_logprobs: list[PositionLogprobs] = []
    """Log-probabilities in order of position, from the prompt's second token on."""
    drafts: DraftCounts | None = None
    """Drafts so far of a sequence with stop strings of which one was verified. The tokenizer
    process finds the end of its answer, and reports them."""
    vector: bytes = b""
    """Numbers as 32-bit floats, with the end of a sequence that asks for them."""
    progress: PromptProgress | None = None
    """Of a prompt that is not complete, if the client wants to know."""

    def extend(self, later: "SequenceOutput") -> None:
        """Add the results of a later step."""
        for name in self.__struct_fields__:
            own, value = getattr(self, name), getattr(later, name)
            if own and isinstance(value, list):
                own.extend(value)
            elif value:  # a list of its own: empty ones may be shared
                setattr(self, name, value.copy() if isinstance(value, list) else value)


class TokenBatch(Message, frozen=True, kw_only=True):
    """The results of one step."""

    outputs: dict[int, SequenceOutput] = {}
    """Results by sequence id."""
    refused: list["SequenceRefused"] = []
    """Sequences that were not accepted, or that the model can't go on with."""

    def output_of(self, seq_id: int) -> SequenceOutput:
        output = self.outputs.get(seq_id)
        if output is None:
            output = self.outputs[seq_id] = SequenceOutput()
        return output

    @property
    def num_tokens(self) -> int:
        return sum([len(output.token_ids) for output in self.outputs.values()])


class SequenceRefused(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler refuses a sequence, or has to drop it; see RequestFailed for the fields."""

    seq_id: int
    message: str
    status: int
    retry_after_s: int | None = None
    grammar_lost: bool = False
    """The scheduler does not have its grammar, or an image: no rank can use it until it is dropped
    and sent again."""
