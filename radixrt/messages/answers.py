"""The messages that carry answers: the report of an answer, from the scheduler to the client, and
the chunks of its text."""

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixrt.base.errors import RequestError
from radixrt.constrained.grammar import Unenforced
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.cache_explanation import CacheExplanation
from radixrt.messages.ids import PackedIds, pack_ids, unpack_ids
from radixrt.messages.images import VisionInfo
from radixrt.messages.message import Message, ToolCall
from radixrt.messages.receipts import Receipt
from radixrt.messages.requests import PoolingInfo


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token and of the likeliest alternatives at its position (natural
    logarithm)."""

    token_id: int
    token: str
    """Text of this token alone; a token that is part of a character shows U+FFFD."""
    token_bytes: bytes
    """The token's own bytes."""
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top: list["TokenLogprob"] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at successive positions: at each, of the chosen token first, then of the
    likeliest.

    >>> columns = LogprobColumns()
    >>> columns.add([7, 8], [-0.5, -1.0])
    >>> found = columns.take(lambda token_id: b"abc"[token_id - 6 : token_id - 5])
    >>> [(one.token, one.logprob, [other.token for other in one.top]) for one in found]
    [('b', -0.5, ['c'])]
    """

    counts: PackedIds = b""
    """Number of tokens at each position."""
    token_ids: PackedIds = b""
    logprobs: bytes = b""
    """Log-probabilities as 64-bit floats; NaN where nothing predicts the token."""
    texts: dict[int, bytes] = {}
    """The bytes of each token."""

    def __len__(self) -> int:
        return len(unpack_ids(self.counts))

    def __iter__(self) -> Iterator[TokenLogprob]:
        for rows in self.in_slices(256):
            yield from rows

    def in_slices(self, size: int) -> Iterator[list[TokenLogprob]]:
        """Lists of at most ``size`` positions."""
        ends = np.cumsum(unpack_ids(self.counts)).tolist()
        ids, values = unpack_ids(self.token_ids), self._values()
        start = 0
        for first in range(0, len(ends), size):
            some = ends[first : first + size]
            found = self._tokens(ids[start : some[-1]].tolist(), values[start : some[-1]].tolist())
            bounds = [0, *(end - start for end in some)]
            yield [
                msgspec.structs.replace(found[begin], top=found[begin + 1 : end])
                for begin, end in itertools.pairwise(bounds)
            ]
            start = some[-1]

    def chosen(self) -> list[float]:
        """The log-probabilities of the chosen tokens alone, those that are known."""
        counts = unpack_ids(self.counts)
        values = self._values()[np.cumsum(counts) - counts]
        return values[~np.isnan(values)].tolist()

    def _values(self) -> NDArray[np.float64]:
        return np.frombuffer(self.logprobs, dtype="<f8")

    def _tokens(self, ids: list[int], values: list[float]) -> list[TokenLogprob]:
        return [
            TokenLogprob(
                token_id,
                self.texts[token_id].decode("utf-8", "replace"),
                self.texts[token_id],
                None if math.isnan(value) else value,
            )
            for token_id, value in zip(ids, values, strict=True)
        ]


class LogprobColumns:
    """Collects log-probabilities, position by position."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._counts = array("i")
        self._token_ids: list[PackedIds] = []
        self._logprobs = array("d")

    def add(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        """One position."""
        self.add_packed(pack_ids(list(token_ids)), logprobs)

    def add_packed(self, token_ids: PackedIds, logprobs: Iterable[float]) -> None:
        """The same as :meth:`add`, with packed ids."""
        self._counts.append(len(token_ids) // 4)
        self._token_ids.append(token_ids)
        self._logprobs.extend(logprobs)

    def take(self, bytes_of: Callable[[int], bytes]) -> TokenLogprobs:
        """The positions added so far; those that are added later begin anew.

        Args:
            bytes_of: the bytes of a token.
        """
        token_ids = b"".join(self._token_ids)
        different = np.unique(unpack_ids(token_ids)).tolist()
        taken = TokenLogprobs(
            pack_ids(self._counts),
            token_ids,
            np.asarray(self._logprobs, dtype="<f8").tobytes(),
            dict(zip(different, map(bytes_of, different), strict=True)),
        )
        self._begin()
        return taken


FinishReason = Literal["stop", "length", "abort"]


class PromptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt itself, for requests that want it back (its token ids, or their
    log-probabilities)."""

    text: str
    """The prompt as the chat template renders it, or decoded from the token ids."""
    token_ids: PackedIds
    logprobs: TokenLogprobs | None = None


DraftCounts = dict[str, tuple[int, int]]
"""How many draft tokens of each drafter were verified, and how many of these were accepted."""


def draft_totals(drafts: DraftCounts) -> tuple[int, int]:
    """The same numbers, of all drafters.

    >>> draft_totals({"ngram": (5, 2), "head": (4, 4)})
    (9, 6)
    """
    counts = drafts.values()
    return sum(drafted for drafted, _ in counts), sum(accepted for _, accepted in counts)


class AnswerReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The facts about one answer beside its text.

    The scheduler makes it with the first token and again with the last one; the tokenizer process
    adds the facts that only it knows. It reaches the client whole: a new fact is a new field here,
    set by its producer.

    A new field needs a default. It may stand anywhere: on the wire the fields are known by their
    order alone (``array_like``), but all processes of an engine run the same code, and no report is
    stored.
    """

    prompt_tokens: int = 0
    image_tokens: int = 0
    """Prompt tokens that are placeholders of images; set by the tokenizer process."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the radix tree."""
    disk_tokens: int = 0
    """Those of them that were read from disk for this answer."""
    cache_write_tokens: int = 0
    """Prompt tokens whose KV was computed and put into the radix tree."""
    output_tokens: int = 0
    """Tokens of this answer so far."""
    accepted_prediction_tokens: int = 0
    """Draft tokens of a complete answer that were accepted. They are among its tokens."""
    rejected_prediction_tokens: int = 0
    """Draft tokens that were verified and are not in the answer."""
    drafts: DraftCounts = {}
    """The drafts of a complete answer. Accepted tokens behind a stop string count here too."""
    replayed_tokens: int = 0
    """Leading output tokens that were computed for another request; the scheduler's number may
    exceed the answer, and the tokenizer process cuts it."""
    reasoning_tokens: int = 0
    """Output tokens of the reasoning, with its tags; set by the tokenizer process."""
    finish_reason: FinishReason | None = None
    """None until the answer is complete."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer; None if the model's own end token
    did."""
    encode_s: float = 0.0
    """Seconds to render and encode the prompt, with the wait for earlier prompts; set by the
    tokenizer process, as the next one."""
    grammar_s: float = 0.0
    """Seconds to compile the constraint, beside the encoding; 0 without a constraint."""
    queued_s: float = 0.0
    """Seconds from arrival at the scheduler to the first planned chunk."""
    prefill_s: float = 0.0
    """Seconds from the first planned chunk to the first token."""
    total_s: float = 0.0
    """Seconds from arrival at the scheduler to the last token; 0 until the answer is complete."""
    retries: int = 0
    """Number of rollbacks of this answer after a failed check."""
    unenforced: tuple[Unenforced, ...] = ()
    """Keywords that were not enforced in a complete answer (only if the request allowed it)."""
    violation: str | None = None
    """A complete answer's violation of the unenforced keywords; None: there is none."""
    cache_explanation: CacheExplanation | None = None
    """Why tokens of the prompt missed the cache, in a complete answer whose request asked for it;
    set by the tokenizer process."""

    @property
    def times(self) -> dict[str, float]:
        """The durations by their names."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}


JsonType = Literal["object", "array", "string", "number", "boolean", "null"]


class ValueEvent(msgspec.Struct, frozen=True, array_like=True):
    """A value of a JSON answer begins, or is complete."""

    event: Literal["started", "completed"]
    pointer: str
    """JSON pointer of the value in the answer (RFC 6901)."""
    type: JsonType
    text: str | None = None
    """Its JSON, if it is complete."""
    validated: bool = True
    """It satisfies its schema: no keyword of the constraint is unenforced."""
    tool_call: int | None = None
    """Index of the tool call whose arguments it is in; None: it is in the content."""


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """How much of a prompt is computed; lengths are in tokens."""

    total: int
    cached: int
    """Those whose KV came from the radix tree."""
    processed: int
    """Those whose KV is there, with the cached ones."""
    seconds: float
    """Time since the first chunk of the prompt was planned."""


class AnswerChunk(Message, frozen=True, kw_only=True):
    """A piece of one answer; the whole answer if the request does not stream."""

    request_id: str
    index: int
    """Index among the ``n`` answers."""
    text: str
    """New text: complete characters, without an end that may be the beginning of a stop string."""
    token_ids: PackedIds
    """New tokens. Their text may come in a later chunk."""
    tool_calls: list[ToolCall] = []
    """New calls, or pieces of them; their text is not in ``text``."""
    values: list[ValueEvent] = []
    """Values that begin or are complete in the new text, if the request asked for them."""
    reasoning: str = ""
    """New text of the reasoning before the answer; it is not in ``text``."""
    logprobs: TokenLogprobs | None = None
    log_kept_masses: list[float] = []
    """One a new token, if the request has ``kept_mass``: the logarithm of the probability of all
    tokens that were allowed in its place."""
    receipt: Receipt | None = None
    """With the last chunk, if the request asked for it and the answer was not aborted."""
    vector: bytes = b""
    """The numbers of the prompt, if the request asked for them in place of an answer: as 32-bit
    floats."""
    prompt: PromptInfo | None = None
    """The prompt, with the first chunk, if the request asked for it."""
    progress: PromptProgress | None = None
    """Of the prompt, before the first token, if the request asked for it. Such a chunk has nothing
    else."""
    report: AnswerReport = AnswerReport()
    """The report as far as it is known; complete with the last chunk."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """The report's finish reason: None but in the last chunk."""
        return self.report.finish_reason


class AnswerBatch(Message, frozen=True):
    """The chunks of one step for all its answers: one frame for any batch size."""

    chunks: list[AnswerChunk]


class RequestFailed(Message, frozen=True, kw_only=True):
    """A request was refused or dropped. See :class:`radixrt.base.errors.RequestError` for the
    fields."""

    request_id: str = ""
    """Empty in a CallReply."""
    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @staticmethod
    def from_error(error: RequestError, request_id: str = "") -> "RequestFailed":
        return RequestFailed(request_id=request_id, **vars(error))

    def as_error(self) -> RequestError:
        fields = msgspec.structs.asdict(self)
        del fields["request_id"]
        return RequestError(**fields)


class EngineInfo(Message, frozen=True, kw_only=True):
    """Facts about the engine, sent once from the workers up to the api when requests can be served.
    Lengths are in tokens."""

    engine: int = 0
    """Number of the engine, counted from the start of the server; set by the tokenizer process."""
    replicas: int = 1
    """Replicas of which the other fields are true, if they are always there; 0: engines join and
    leave. Set by the tokenizer process."""
    context_length: int
    """Longest prompt plus answer."""
    vocab_size: int
    kv_pool_tokens: int
    """Tokens of KV that the pool holds."""
    page_size: int
    max_running_requests: int = 256
    """Most sequences in the running batch."""
    kv_bytes_per_token: int
    """Over all layers and ranks."""
    kv_parts: dict[str, str] = {}
    """What the bits of the KV depend on, by name; empty without ``--cache-dir`` and
    ``--receipts``."""
    pool_id: str = ""
    """Names a KV pool in shared memory, whose pages outlive the worker; empty: they do not."""
    kept_states: int = 0
    """States of recurrent layers that are kept beside the KV; 0: the model has no such layers."""
    state_bytes: int = 0
    """Memory of one of them, over all layers and ranks."""
    num_parameters: int
    weight_bytes: int
    """Memory of the weights over all ranks, in the form in which they are kept."""
    dtype: str
    device: str
    attention_backend: str
    speculation: str = ""
    """What tokens are drafted from: text, a head, or both; "": nothing is drafted."""
    architecture: str
    adapters: tuple[AdapterInfo, ...] = ()
    """The LoRA adapters that are loaded."""
    default_sampling: dict[str, Any] = {}
    """Settings of the checkpoint's generation_config.json: temperature, top_p, top_k, ..."""
    eos_token_ids: tuple[int, ...] = ()
    pooling: PoolingInfo | None = None
    """The numbers that the checkpoint gives; None: it generates text."""
    vision: VisionInfo | None = None
    """The vision tower; None: images are not served."""
    why_no_images: str = ""
    """Then, a sentence that says why."""
    has_chat_template: bool = True
    """Whether chats can be rendered; set by the tokenizer process."""
    score_tokens: tuple[int, ...] = ()
    """The tokens by which a checkpoint judges pairs of texts: relevant and, perhaps, not
    relevant."""
