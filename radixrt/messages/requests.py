"""The messages that carry requests: prompts, and the options that travel from the client to the
scheduler."""

from typing import Any, Literal

import msgspec

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import Constraint
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message


class PoolingRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for numbers of a prompt in place of an answer."""

    logits_of: tuple[int, ...] = ()
    """Tokens whose logits behind the prompt are returned. Empty: the numbers that the checkpoint's
    pooling gives."""


DEFAULT_POOLING = PoolingRequest()
"""A vector of an embedding model, or the scores of the classes of a classifier."""


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that a served checkpoint gives in place of text."""

    task: Literal["embed", "classify"]
    """A vector, or a score for each class."""
    size: int
    """Number of numbers of a prompt."""
    normalized: bool = False
    """Vectors have length 1."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    dimensions: tuple[int, ...] = ()
    """Lengths to which the vectors may be cut; empty: any."""
    whole_prompts: bool = False
    """The model is an encoder: each prompt is computed in one step, and none is cached."""


RetentionLevel = Literal["none", "default", "high"]


class TextPrompt(Message, frozen=True):
    text: str
    add_special_tokens: bool = True
    max_tokens: int | None = None
    """A longer text is cut at its end; special tokens behind it stay. None: it is refused where it
    does not fit."""


class TokenPrompt(Message, frozen=True):
    token_ids: PackedIds
    images: list[dict[str, Any]] = []
    """The content parts of its images, see :mod:`radixrt.messages.prompt_images`. Each stands where the
    ids have its placeholders. A part may have the image's ``digest``: an error about placeholders
    names the images that have another one."""


class FimPrompt(Message, frozen=True):
    """Text before and behind a gap that the model fills (fill in the middle)."""

    prefix: str
    suffix: str
    middle: str = ""
    """The beginning of what fills the gap."""
    files: list[tuple[str, str]] = []
    """Names and texts of other files, before the one with the gap."""
    add_special_tokens: bool = True


class CacheBreakpoint(msgspec.Struct, frozen=True, array_like=True):
    """The end of a message up to which a chat's KV is to be kept."""

    message: int
    """Index into the messages; -1: the tools before them."""
    ttl_s: float | None = None
    """Seconds after its last use; None: without a limit."""


class ChatPrompt(Message, frozen=True):
    """The messages of a chat, to be rendered by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    cache_breakpoints: list[CacheBreakpoint] = []
    """The tokenizer process turns them into :class:`Retention`."""
    replay_reasoning: bool = False
    """Earlier answers are as the model generated them, where the tokenizer process still has
    them."""


class PairPrompt(Message, frozen=True):
    """A query and a document that a model judges together."""

    query: str
    document: str
    instruction: str = ""
    """The task, for a chat template, by which the document is judged; "": the usual one."""
    max_tokens: int | None = None
    """The document is cut at its end so that all of it fits; None: it is refused."""
    max_document_tokens: int | None = None
    """A longer document is cut at its end."""


Prompt = TextPrompt | TokenPrompt | FimPrompt | ChatPrompt | PairPrompt


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """The retention level of the KV of a request's first tokens."""

    level: RetentionLevel
    num_tokens: int | None = None
    """Leading tokens of prompt and answer that it covers; None: all."""
    ttl_s: float | None = None
    """Seconds from the end of the request after which the level is "default" again; None: it
    stays."""


class CacheHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client's knowledge of the future use of a request's KV. Advice: it never changes an
    answer."""

    retain: list[Retention] = []
    """Retention levels; where several cover the same tokens, the higher one holds."""
    next_use_s: float | None = None
    """Seconds from the end of the request until the client expects to go on from here."""
    session: str = ""
    """The session of the request: a ReleaseCacheCall releases all KV of a session at once."""
    explain: bool = False
    """The answer explains the request's cache misses."""
    explain_texts: bool = False
    """It may show texts, and facts about other salts of the same key."""


NO_HINTS = CacheHints()


class Tenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The holder of an API key, for whom a request or a call is made. The default stands for all
    clients of a server without declared keys."""

    name: str = ""
    """The name of the key."""
    cache_namespace: str = ""
    """Prefixes are shared only within it."""
    weight: float = 1.0
    """Share of the engine while others wait, relative to their weights."""
    max_tokens: int | None = None
    """Most tokens of one answer."""
    max_pinned_fraction: float = 1.0
    """Share of the KV pool that the namespace may pin at a time."""
    max_cached_fraction: float | None = None
    """Share of the KV pool above which the namespace's pages are evicted first."""

    def at_most(self, max_tokens: int) -> int:
        """A default of ``max_tokens``, within the tenant's limit."""
        return max_tokens if self.max_tokens is None else min(max_tokens, self.max_tokens)

    def root(self, salt: str | None, adapter: str = "") -> CacheRoot:
        """The root of a request that brings a cache salt.

        >>> Tenant(cache_namespace="key:bob").root("a")
        CacheRoot(tenant='key:bob', salt='a', adapter='')
        """
        return CacheRoot(self.cache_namespace, salt or "", adapter)


NO_TENANT = Tenant()


IdleKind = Literal["", "arriving", "expected"]
"""Work for idle times: the beginning of a prompt whose rest is on its way, which is computed as
fast as it can be; or a prompt that may come, which gets a share of the time. Empty: none."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a request that the scheduler reads. They travel whole from the client to the
    scheduler's sequence."""

    sampling: SamplingParams = SamplingParams()
    tenant: Tenant = NO_TENANT
    root: CacheRoot = BASE_ROOT
    """Prefixes are shared only among requests with the same root. It names the adapter."""
    adapter_name: str = ""
    """The name by which the client asked for the adapter, for errors."""
    cache_hints: CacheHints = NO_HINTS
    priority: int = 0
    """The smallest goes first on a server that orders by priority."""
    deadline: float | None = None
    """Unix time in seconds after which the request is dropped."""
    pool: PoolingRequest | None = None
    """Numbers of the prompt in place of an answer; None: an answer."""
    speculation: bool = True
    """Tokens may be drafted, if the server does."""
    prepares_next_turn: bool = False
    """Behind the answer of a chat, the beginning of its next turn is computed in idle time."""
    idle: IdleKind = ""
    """The prompt is computed, without an answer, only while nothing else waits or runs."""
    shares_answers: bool = False
    """Equal requests may get tokens that were computed for one of them."""
    progress: bool = False
    """The client is informed how much of the prompt is computed."""


class PartialAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The part of an answer that its client has from an engine that died."""

    token_ids: PackedIds = b""
    retries: int = 0
    """Retries in the report that came with the last of these tokens; sampling depends on it."""
    is_complete: bool = False


class GenerateRequest(Message, frozen=True, kw_only=True):
    """One prompt, ``n`` answers. Answered by AnswerChunks (in AnswerBatches) until each is
    complete, or by one RequestFailed."""

    request_id: str
    """Never used twice."""
    group_id: str = ""
    """Shared by the prompts of one HTTP request, which are aborted together and are one key of the
    fair queue of encoding. Default: the request's own id."""
    group_size: int = 1
    """Answers of the group that are submitted at once; the others follow when some of these have
    ended."""
    prompt: Prompt
    options: RequestOptions = RequestOptions()
    stream: bool = False
    """False: one AnswerChunk an answer, when it is complete."""
    return_prompt_token_ids: bool = False
    """The first chunk brings the prompt, as it also does where its log-probabilities are asked
    for."""
    parse_tool_calls: str = ""
    """Take tool calls out of the answers' text: the name of how the model writes them, a key of
    :data:`radixrt.constrained.tool_calls.FORMATS`. Empty: they stay."""
    constraint: Constraint | None = None
    """The constraint on the answers."""
    parse_reasoning: str = ""
    """Take the reasoning out of the answers' text: the name of how the model marks it, a key of
    :data:`radixrt.parsers.reasoning.FORMATS`. The constraint begins after it. Empty: it stays."""

    prediction: str = ""
    """The text of the answers as the client expects them, from which tokens are drafted."""
    stream_values: bool = False
    """The chunks say which values of the JSON begin and are complete."""
    growth: Literal["", "text", "messages"] = ""
    """The prompt is the beginning of one to come, of which the tokens are computed that no later
    text changes: it grows by text of its last message, or by messages. "": it is complete."""
    receipt: bool = False
    """The last chunk of each answer has its receipt."""

    resumed: list[PartialAnswer] = []
    """The ``n`` answers so far, which a new engine continues; empty: none has begun."""

    @property
    def sampling(self) -> SamplingParams:
        """The options' sampling settings."""
        return self.options.sampling

    @property
    def says_how(self) -> bool:
        """The client gets more than an answer: how it was computed."""
        asked = self.sampling.logprobs, self.sampling.prompt_logprobs
        also = self.sampling.kept_mass, self.receipt, self.options.cache_hints.explain
        return asked != (None, None) or any(also)


class AbortRequest(Message, frozen=True):
    """Drop a request. Unknown and finished ids are ignored."""

    request_id: str
