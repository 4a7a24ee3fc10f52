"""Every message that crosses a process border, in the order a request meets them.

    api ── tokenizer ── scheduler ── worker

All are ``msgspec.Struct``s in msgpack, told apart by a tag. Token ids travel as packed int32 bytes
(:func:`pack_ids`, :func:`unpack_ids`). Nothing is ever pickled.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixrt.constrained.grammar import Grammar, Unenforced
from radixrt.constrained.spec import Spec
from radixrt.errors import RequestError
from radixrt.sampling_params import SamplingParams

TokenIds = NDArray[np.int32]
PackedIds = bytes
FinishReason = Literal["stop", "length", "abort"]
RetentionLevel = Literal["none", "default", "high"]


NO_TOKEN = -1
"""In place of a sampled token: the model's logits were not finite, so there was nothing to sample from."""

GRAMMAR_FAILED = -2
"""In place of a sampled token: no token of the vocabulary goes on with the grammar, or its matcher gave up."""


def pack_ids(ids: Sequence[int] | NDArray[np.integer]) -> PackedIds:
    """Pack token, page, slot or sequence ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: PackedIds) -> TokenIds:
    """The inverse of :func:`pack_ids`; the array is read-only and shares the bytes."""
    return np.frombuffer(packed, dtype="<i4")


def num_ids(packed: PackedIds) -> int:
    """How many ids are packed."""
    return len(packed) // 4


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# ---------------------------------------------------------------- api → tokenizer


class TextPrompt(Message, frozen=True):
    text: str
    add_special_tokens: bool = True


class TokenPrompt(Message, frozen=True):
    token_ids: PackedIds


class CacheBreakpoint(msgspec.Struct, frozen=True, array_like=True):
    """A conversation is worth keeping up to the end of one of its messages."""

    message: int
    """Index into the conversation's messages; -1: the tools before them."""
    ttl_s: float | None = None
    """For so many seconds after its last use; None: as long as there is room for such."""


class ChatPrompt(Message, frozen=True):
    """A conversation, to be rendered by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    cache_breakpoints: list[CacheBreakpoint] = []
    """Each keeps the conversation up to it; the tokenizer process turns them into :class:`Retention`."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """How much a client wants the KV of a request's first tokens kept."""

    level: RetentionLevel
    num_tokens: int | None = None
    """Leading tokens of prompt and answer that it is about; None: all."""
    ttl_s: float | None = None
    """Seconds from the end of the request after which the level is "default" again; None: it stays."""


class CacheHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client knows of the future of a request's KV. Advice: it never changes an answer."""

    retain: list[Retention] = []
    """Where several are about the same tokens, the higher level holds."""
    next_use_s: float | None = None
    """Seconds from the end of the request until the client expects to go on from here."""
    session: str = ""
    """Whose requests these are: a ReleaseCacheCall lets go of a session's KV all at once."""


NO_HINTS = CacheHints()


class GenerateRequest(Message, frozen=True, kw_only=True):
    """One prompt, ``sampling.n`` answers. Answered by AnswerChunks (in AnswerBatches) until each has finished,
    or by one RequestFailed."""

    request_id: str
    """Never used twice."""
    owner: str = ""
    """Whose turn encoding this prompt is: the prompts of one HTTP request share one. Default: its own."""
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    """False: one AnswerChunk an answer, when it is complete."""
    cache_salt: str = ""
    """Prefixes are shared only among requests with the same salt."""
    priority: int = 0
    """The smallest goes first on a server that orders by priority."""
    cache_hints: CacheHints = NO_HINTS
    deadline: float | None = None
    """Unix time in seconds after which the request is dropped."""
    return_prompt_token_ids: bool = False
    parse_tool_calls: str = ""
    """Take tool calls out of the answers' text: the name of how the model writes them, a key of
    :data:`radixrt.constrained.tool_calls.FORMATS`. Empty: they stay."""
    structured: Spec | None = None
    """What the answers are held to."""
    parse_reasoning: str = ""
    """Take the thought out of the answers' text: the name of how the model marks it, a key of
    :data:`radixrt.tokenizer.reasoning.FORMATS`. What the answers are held to begins after it. Empty: it stays."""


class AbortRequest(Message, frozen=True):
    """Drop a request. Unknown and finished ids are ignored."""

    request_id: str


class TokenizeCall(Message, frozen=True):
    """Answered by a CallReply whose value is {"token_ids": list[int], "prompt": str}."""

    call_id: int
    prompt: Prompt


class DetokenizeCall(Message, frozen=True):
    """Answered by a CallReply whose value is {"text": str}."""

    call_id: int
    token_ids: PackedIds
    skip_special_tokens: bool = False


class FlushCacheCall(Message, frozen=True):
    """Empty the radix tree. Answered by a CallReply whose value is {"pages_freed": int}.

    Only what no running request uses is dropped.
    """

    call_id: int


class PinCall(Message, frozen=True, kw_only=True):
    """Keep what the tree holds of a prompt from eviction, for a time: a lease.

    Answered by a CallReply whose value is {"lease": str, "pinned_tokens": int, "expires_in_s": float}, or whose error
    says that too much is pinned already.
    """

    call_id: int
    prompt: Prompt
    cache_salt: str = ""
    ttl_s: float


class ReleaseCacheCall(Message, frozen=True, kw_only=True):
    """End a lease, or say that a session has ended: its KV goes first from now on.

    Answered by a CallReply whose value is {"released_tokens": int}; the error of an unknown lease has status 404.
    """

    call_id: int
    lease: str = ""
    session: str = ""
    cache_salt: str = ""
    """Of the session's requests."""


class CacheTreeCall(Message, frozen=True, kw_only=True):
    """An aggregated view of the radix tree. Answered by a CallReply whose value is a CacheTree, as builtins
    but for packed ids."""

    call_id: int
    depth: int = 3
    """Levels of nodes shown below each root; what is below them is summed up."""
    children: int = 16
    """Most children shown of a node, those with the most pages below them; the others are summed up."""


class CompileCall(Message, frozen=True, kw_only=True):
    """Compile a constraint ahead of the requests that will use it.

    Answered by a CallReply whose value is {"backend": str, "checks": list, "unenforced": list, "compile_s": float}.
    """

    call_id: int
    structured: Spec


class StatsCall(Message, frozen=True):
    """Answered by a CallReply whose value is a SchedulerStats, as builtins."""

    call_id: int
    check_invariants: bool = False
    """Also check that every page is accounted for; a violation is the reply's error."""
    malformed_frames: int = 0
    """That the tokenizer process has dropped; the scheduler adds its own."""


# ---------------------------------------------------------------- tokenizer → api


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token and of the likeliest alternatives at its position."""

    token_id: int
    token: str
    """Text of this token alone; a token that is part of a character shows U+FFFD."""
    token_bytes: bytes
    """The token's own bytes."""
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top: list["TokenLogprob"] = []


class PromptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a prompt once it is tokenized; travels with an answer's first chunk."""

    num_tokens: int
    text: str | None = None
    """The rendered prompt, for echo; None unless prompt_logprobs or token ids were asked for."""
    token_ids: PackedIds | None = None
    logprobs: list[TokenLogprob] | None = None


class AnswerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds, as the scheduler saw them."""

    queued_s: float = 0.0
    """From arrival at the scheduler to the first planned chunk."""
    prefill_s: float = 0.0
    """From the first planned chunk to the first token."""
    total_s: float = 0.0
    """From arrival at the scheduler to the last token."""


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """One call of a tool: whole, or the first piece of it; what follows of a call has no name."""

    index: int
    """Which of the answer's calls."""
    name: str
    arguments: str
    """JSON, or the next piece of it."""


class AnswerChunk(Message, frozen=True, kw_only=True):
    """A piece of one answer (or the whole of it, where the request did not stream)."""

    request_id: str
    index: int
    """Which of the ``n`` answers."""
    text: str
    """New text: complete characters only, nothing that may yet turn out to be a stop string."""
    token_ids: PackedIds
    """New tokens. Their text may come in a later chunk."""
    tool_calls: list[ToolCall] = []
    """New calls, or pieces of them; their text is not in ``text``."""
    reasoning: str = ""
    """New text of the thought before the answer; it is not in ``text``."""
    logprobs: list[TokenLogprob] | None = None
    prompt: PromptInfo | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer."""
    num_output_tokens: int = 0
    """Tokens of this answer so far."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the radix tree."""
    cache_write_tokens: int = 0
    """Prompt tokens whose KV was computed and put into the radix tree."""
    times: AnswerTimes | None = None
    """With the last chunk."""
    retries: int = 0
    """How often a part of this answer was taken back because a check found it invalid."""
    unenforced: tuple[Unenforced, ...] = ()
    """With the last chunk: what the answer was not held to (only where the request allowed it)."""
    violation: str | None = None
    """With the last chunk: how the answer breaks what it was not held to; None: it does not."""


class AnswerBatch(Message, frozen=True):
    """The chunks of one step for all its answers: one frame, whatever the batch size."""

    chunks: list[AnswerChunk]


class RequestFailed(Message, frozen=True, kw_only=True):
    """The request was refused, or was lost. See :class:`radixrt.errors.RequestError`."""

    request_id: str = ""
    """Empty in a CallReply."""
    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @staticmethod
    def of(error: RequestError, request_id: str = "") -> "RequestFailed":
        return RequestFailed(
            request_id=request_id,
            message=error.message,
            status=error.status,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )

    def as_error(self) -> RequestError:
        return RequestError(
            self.message,
            status=self.status,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )


class CallReply(Message, frozen=True, kw_only=True):
    call_id: int
    value: Any = None
    error: RequestFailed | None = None


class EngineInfo(Message, frozen=True, kw_only=True):
    """Sent once, up the whole chain, when the engine can take requests. Lengths are in tokens."""

    context_length: int
    """Longest prompt plus answer."""
    vocab_size: int
    kv_pool_tokens: int
    """Tokens of KV that the pool holds."""
    page_size: int
    kv_bytes_per_token: int
    """Over all layers and ranks."""
    num_parameters: int
    weight_bytes: int
    """Memory of the weights over all ranks, in the form in which they are kept."""
    dtype: str
    device: str
    attention_backend: str
    architecture: str
    default_sampling: dict[str, Any] = {}
    """From the checkpoint's generation_config.json: temperature, top_p, top_k, ..."""
    eos_token_ids: tuple[int, ...] = ()


# ---------------------------------------------------------------- tokenizer → scheduler


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
    constraint: "Constraint | None" = None


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


class PinTokensCall(Message, frozen=True, kw_only=True):
    """A PinCall whose prompt is tokenized."""

    call_id: int
    token_ids: PackedIds
    cache_salt: str
    ttl_s: float


# FlushCacheCall, ReleaseCacheCall, CacheTreeCall and StatsCall are passed on.


# ---------------------------------------------------------------- scheduler → tokenizer


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


class TimeHistogram(msgspec.Struct):
    """A Prometheus-style histogram: ``counts[i]`` observations ≤ ``bounds[i]``, not cumulative; the last
    entry of counts is what lies above all bounds."""

    bounds: list[float]
    counts: list[int]
    total: float = 0.0

    @staticmethod
    def empty(bounds: list[float]) -> "TimeHistogram":
        return TimeHistogram(bounds, [0] * (len(bounds) + 1))

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class StructuredStats(msgspec.Struct, kw_only=True):
    """Counters of structured output since start, from the tokenizer process."""

    requests: int = 0
    """Constraints asked for."""
    refused: int = 0
    """Of those, what can't be enforced."""
    checks: int = 0
    """Values that a validator looked at."""
    retries: int = 0
    """Values that were taken back."""
    exhausted: int = 0
    """Requests that failed because no valid value was found."""
    violations: int = 0
    """Finished answers that broke a schema although it was enforced: bugs."""
    cache_hits: int = 0
    """Constraints that were compiled already."""
    cache_misses: int = 0
    helpers_killed: int = 0
    """Helper processes that went over a limit of time or memory."""


class Counters(msgspec.Struct, kw_only=True):
    """What the scheduler counts since start."""

    prompt_tokens: int = 0
    """Of admitted sequences."""
    cached_tokens: int = 0
    """Of those, found in the tree."""
    cache_write_tokens: int = 0
    """Prompt tokens computed and put into the tree."""
    output_tokens: int = 0
    forced_tokens: int = 0
    """Of output_tokens, those that a grammar forced: no forward pass sampled them."""
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    retractions: int = 0
    steps: int = 0
    step_seconds: TimeHistogram
    """Wall time of a step on the worker."""
    plan_seconds: TimeHistogram
    """Time the scheduler took to plan a step."""
    forward_seconds: float = 0.0
    """Of step_seconds, the model's forward passes; all steps together."""
    wait_seconds: float = 0.0
    """Time that the worker waited for plans although there was work; all steps together."""


class SchedulerStats(Counters, kw_only=True):
    """The counters, and gauges of this moment."""

    running: int
    waiting: int
    evicted_pages: int
    """Since start."""
    pages_total: int
    pages_owned: int
    """Held by running sequences alone."""
    pages_cached: int
    """In the tree, locked or not."""
    pages_evictable: int
    """In the tree and not locked."""
    pages_free: int
    pages_pinned: int
    """In the tree, under a lease."""
    leases: int
    leases_broken: int
    """Since start, given up before their time, as a sequence could not have gone on."""
    sessions: int
    """Named by hints and not ended."""
    grammars: int
    """That the worker holds."""
    tree_nodes: int
    malformed_frames: int
    """Frames that any process could not read."""
    kv_events: int = 0
    """Published on the KV-event stream."""
    kv_event_replays: int = 0
    """Times that a subscriber got batches again that it had missed."""
    kv_event_snapshots: int = 0
    """Times that a subscriber lacked more than is kept."""
    structured: StructuredStats = msgspec.field(default_factory=StructuredStats)
    """Filled in by the tokenizer process."""


class CacheTreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the radix tree and all that hangs below it."""

    text: str | None = None
    """Of the first tokens, in their place from the tokenizer process on; None: it is not told."""
    first_token_ids: PackedIds = b""
    """Up to 32 of the edge's tokens."""
    num_tokens: int
    """Of the edge."""
    total_tokens: int
    """Of the edge and everything below it."""
    total_nodes: int
    locked: bool
    """Used by a running sequence or pinned."""
    pinned: bool
    idle_s: float
    """Since its last use."""
    retention: RetentionLevel = "default"
    children: list["CacheTreeNode"] = []
    """Those with the most tokens below them first; fewer than there are, where the view ends."""


class CacheNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests with one cache salt share."""

    salted: bool
    """Whether there is a salt; it is a secret and not told."""
    total_tokens: int
    total_nodes: int
    children: list[CacheTreeNode]


class CacheTree(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the reply to a CacheTreeCall."""

    page_size: int
    total_tokens: int
    total_nodes: int
    namespaces: list[CacheNamespace]
    """Those with the most tokens first."""


# ---------------------------------------------------------------- scheduler → worker


class LoadGrammar(Message, frozen=True, kw_only=True):
    """Make a grammar ready for sequences to come. Answered by a GrammarLoaded from every rank."""

    grammar_id: int
    grammar: Grammar


class DropGrammar(Message, frozen=True):
    """No sequence to come uses this grammar."""

    grammar_id: int


class GrammarUse(msgspec.Struct, frozen=True, array_like=True):
    """How a sequence is held to a loaded grammar; see Constraint."""

    grammar_id: int
    begin_after: PackedIds = b""
    excluded: list[PackedIds] = []
    excluded_from: int = 0
    """Generated tokens before the excluded paths begin."""


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """Put a sequence into a slot."""

    slot: int
    token_ids: PackedIds
    """Prompt, and what was generated before a retraction."""
    num_cached: int
    """Leading tokens whose KV the given pages already hold."""
    pages: PackedIds
    """Block table so far: position p lies in ``pages[p // page_size]``."""
    sampling: SamplingParams
    num_output: int
    """How many of token_ids were generated: penalties, min_tokens and the grammar count them."""
    grammar: GrammarUse | None = None


class BlockTable(msgspec.Struct, frozen=True, array_like=True):
    """The whole block table of a slot, in place of the one it had."""

    slot: int
    pages: PackedIds


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """Compute the next ``num_tokens`` prompt tokens of a slot, from position ``start``.

    ``start`` moves past what the worker computed for this slot when another sequence's pages were
    adopted. The chunk that reaches the end of the prompt samples a token.
    """

    slot: int
    start: int
    num_tokens: int


class StepPlan(Message, frozen=True, kw_only=True):
    """What changes before this step, then the step itself.

    Applied in this order: ``release``, ``admit``, ``block_tables``, ``extend_*``. Then one forward pass
    computes the ``prefill`` chunks and one token for every slot whose prompt was complete before: those
    need no mention, so a step in which nothing changes is a few bytes whatever the batch size.
    """

    step_id: int
    release: list[int] = []
    admit: list[Admit] = []
    block_tables: list[BlockTable] = []
    """Of slots that adopted pages which another sequence computes."""
    extend_slots: PackedIds = b""
    extend_pages: PackedIds = b""
    """Page ``extend_pages[i]`` is appended to the block table of slot ``extend_slots[i]``."""
    prefill: list[Prefill] = []


# ---------------------------------------------------------------- worker → scheduler


class GrammarLoaded(Message, frozen=True, kw_only=True):
    """One rank has made a grammar ready, or could not."""

    grammar_id: int
    error: str | None = None


class StepResult(Message, frozen=True, kw_only=True):
    """The sampled tokens of one step, in columns; a slot with several tokens has several entries."""

    step_id: int
    slots: PackedIds
    token_ids: PackedIds
    """Sampled tokens, each followed by those that the grammar forces after it; or NO_TOKEN, GRAMMAR_FAILED."""
    jump_slots: PackedIds = b""
    jump_tokens: PackedIds = b""
    """Slot ``jump_slots[i]`` was advanced by ``jump_tokens[i]`` forced tokens beyond the one of a decode step."""
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[LogprobRow] = []
    forward_s: float = 0.0
    """The model's forward pass, logits included."""
    wait_s: float = 0.0
    """What the worker waited for this plan after the step before."""
    step_s: float = 0.0
    """Whole step on the worker: apply the plan, forward, sample."""


ToTokenizerFromApi = (
    GenerateRequest
    | AbortRequest
    | TokenizeCall
    | DetokenizeCall
    | CompileCall
    | FlushCacheCall
    | PinCall
    | ReleaseCacheCall
    | CacheTreeCall
    | StatsCall
)
ToApi = EngineInfo | AnswerBatch | RequestFailed | CallReply
ToScheduler = (
    SequenceRequest
    | ReleaseSequences
    | FlushCacheCall
    | PinTokensCall
    | ReleaseCacheCall
    | CacheTreeCall
    | StatsCall
)
ToTokenizerFromScheduler = EngineInfo | TokenBatch | CallReply
ToWorker = StepPlan | LoadGrammar | DropGrammar
ToSchedulerFromWorker = EngineInfo | StepResult | GrammarLoaded
