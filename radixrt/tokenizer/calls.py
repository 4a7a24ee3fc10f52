"""Answers the calls of the api: alone, or together with the schedulers."""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial, singledispatchmethod
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from radixrt.base.errors import RequestError
from radixrt.constrained.advice import Advice
from radixrt.messages.cache_explanation import SHOWN_TOKENS, CacheExplanation, CacheFacts
from radixrt.messages.calls import (
    AnyCall,
    AnySchedulerCall,
    CacheFactsCall,
    CacheNodeCall,
    CacheTreeCall,
    CallReply,
    CompileCall,
    DetokenizeCall,
    ExplainCacheCall,
    MatchCall,
    PinCall,
    StatsCall,
    TokenizeCall,
    Tokenized,
)
from radixrt.messages.ids import PackedIds, num_ids, unpack_ids
from radixrt.messages.requests import NO_TENANT, Prompt, Tenant, TokenPrompt
from radixrt.tokenizer.constraints.manager import ConstraintManager
from radixrt.tokenizer.explain.explainer import Explainer
from radixrt.tokenizer.explain.records import PromptRecord
from radixrt.tokenizer.fair_queue import FairQueue
from radixrt.tokenizer.in_flight import Send, failure
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.kept_answers import TokenMemory
from radixrt.tokenizer.prompt.prompts import PromptEncoder, shows_images, size_in_chars
from radixrt.tokenizer.vocabulary import Vocabulary

CAPACITY_BYTES = 4 << 20
"""Most memory, as for some 5,000 nodes."""


class NodeTexts:
    """The texts of the first tokens of nodes. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._memory: TokenMemory[str] = TokenMemory(min(CAPACITY_BYTES, max_bytes))

    def text_of(self, token_ids: PackedIds) -> str:
        """The text of a node's first tokens."""
        text = self._memory.find(token_ids)
        if text is None:
            text = self._vocabulary.decode(unpack_ids(token_ids).tolist())
            self._memory.keep(token_ids, text, len(token_ids) + sys.getsizeof(text))
        return text


Result = TypeVar("Result")

_Builtins = dict[str, Any]
"""The struct that a scheduler has replied with, as builtins."""

_CALLS = ""
"""Key of all calls of a tenant in the fair queue: together they count as one request."""


MAX_NODE_TOKENS = 1024
"""Most tokens of a node's edge, and of those before it, that are shown as text."""


@dataclasses.dataclass(eq=False)
class Calls:
    """The calls of one engine. Those to which this process adds something have a handler below,
    found by their type.

    Args:
        ask: lets the schedulers answer a call, and returns the value of their reply as builtins.
        malformed_frames: returns the number of frames that this process has dropped.
    """

    vocabulary: Vocabulary
    encoder: PromptEncoder
    limits: Limits
    constraints: ConstraintManager
    queue: FairQueue
    shows_cache_texts: bool
    explainer: Explainer
    node_texts: NodeTexts
    to_api: Send
    ask: Callable[[AnySchedulerCall], Awaitable[Any]]
    malformed_frames: Callable[[], int]
    _tasks: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)

    def take(self, call: AnyCall) -> None:
        """Start the work of a call."""
        task = asyncio.get_running_loop().create_task(self._reply(call))
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, call: AnyCall) -> None:
        try:
            value = await self._answer(call)
            self.to_api(CallReply(call_id=call.call_id, value=value))  # which may be unsendable
        except Exception as error:
            self.to_api(CallReply(call_id=call.call_id, error=failure("", error)))

    def _queued(
        self, tenant: Tenant, size: int, work: Callable[[], Result], *prompts: Prompt
    ) -> Awaitable[Result]:
        """The result of work on about ``size`` characters, or on prompts, done in the fair queue."""
        has_images = shows_images(*prompts)
        return self.queue.run(tenant.name, _CALLS, size, work, has_images=has_images)

    # ------------------------------------------------------------ one call each

    @singledispatchmethod
    async def _answer(self, call: AnySchedulerCall) -> Any:
        """The value of the reply; by default that of the schedulers."""
        return await self.ask(call)

    @_answer.register
    async def _tokenize(self, call: TokenizeCall) -> Tokenized:
        size = size_in_chars(call.prompt)

        def encode() -> Tokenized:
            self.limits.check_call(size, is_text=True)
            encoded = self.encoder.encode(call.prompt, self._any_length, call.root)
            text, ids = encoded.text, encoded.token_ids
            return Tokenized(ids, self.vocabulary.decode(ids) if text is None else text)

        return await self._queued(call.tenant, size, encode, call.prompt)

    @_answer.register
    async def _detokenize(self, call: DetokenizeCall) -> str:
        def decode() -> str:
            ids = unpack_ids(call.token_ids)
            self.limits.check_call(len(ids), is_text=False)
            self.limits.check_token_ids(ids)
            return self.vocabulary.decode(ids.tolist(), call.skip_special_tokens)

        return await self._queued(call.tenant, num_ids(call.token_ids), decode)

    @_answer.register
    async def _compile(self, call: CompileCall) -> Advice:
        return await self.constraints.compile_ahead(call.constraint, call.tenant.name)

    @_answer.register
    async def _pin(self, call: PinCall) -> _Builtins:
        encode = partial(self.encoder.encode, call.prompt, self.limits, call.root)
        encoded = await self._queued(call.tenant, size_in_chars(call.prompt), encode, call.prompt)
        return await self.ask(replace(call, prompt=TokenPrompt(encoded.keys)))

    @_answer.register
    async def _match(self, call: MatchCall) -> list[_Builtins]:
        size = sum(map(size_in_chars, call.prompts))
        self.limits.check_call(size, is_text=True)

        def encode() -> list[TokenPrompt]:
            encode, limits = self.encoder.encode, self._any_length
            encoded = (encode(one, limits, call.root) for one in call.prompts)
            return [TokenPrompt(one.keys) for one in encoded]

        prompts = await self._queued(call.tenant, size, encode, *call.prompts)
        return await self.ask(replace(call, prompts=prompts))

    @_answer.register
    async def _explain(self, call: ExplainCacheCall) -> list[CacheExplanation]:
        records, name = self.explainer.records, call.tenant.name
        if call.session:
            explanations = []
            for record in records.of_session(name, call.session):
                with contextlib.suppress(RequestError):  # its facts are not there yet, or no more
                    explanations.append(await self._explanation(record, call))
            return explanations
        found = records.find(name, call.request_id)
        if found is None or not found.seq_ids:
            raise RequestError(
                "This request is unknown, or too long ago: only the last ones can be explained.",
                status=404,
            )
        return [replace(await self._explanation(found, call), request_id=call.request_id)]

    async def _explanation(self, record: PromptRecord, call: ExplainCacheCall) -> CacheExplanation:
        facts = msgspec.convert(await self.ask(CacheFactsCall(record.seq_ids[0])), CacheFacts)
        work = partial(self.explainer.explain, record, facts, call.with_texts)
        return await self._queued(call.tenant, SHOWN_TOKENS, work)

    @_answer.register
    async def _tree(self, call: CacheTreeCall) -> _Builtins:
        tree = await self.ask(call)
        shows_texts = self.shows_cache_texts and call.with_texts
        work = partial(with_texts, tree, self.node_texts.text_of, shows_texts)
        return await self._queued(NO_TENANT, _num_shown_tokens(tree), work)

    @_answer.register
    async def _node(self, call: CacheNodeCall) -> _Builtins:
        work = partial(self._with_text, await self.ask(call))
        return await self._queued(NO_TENANT, 2 * MAX_NODE_TOKENS, work)

    @_answer.register
    async def _stats(self, call: StatsCall) -> _Builtins:
        stats: _Builtins = await self.ask(call)
        stats["malformed_frames"] += self.malformed_frames()
        stats["structured"] = msgspec.to_builtins(self.constraints.stats())
        return stats

    @property
    def _any_length(self) -> Limits:
        """The limits of a prompt that need not fit the context."""
        return dataclasses.replace(self.limits, context_length=2**31)

    def _with_text(self, node: _Builtins) -> _Builtins:
        """A CacheNode as builtins, with the text of its edge and of the tokens before it, if they
        may be shown."""
        _, own_salt, _ = node["root"]
        if self.shows_cache_texts and not own_salt:
            ids = unpack_ids(node["token_ids"])
            start = len(ids) - node["num_tokens"]
            before = ids[max(0, start - MAX_NODE_TOKENS) : start]
            node["text_before"] = self.vocabulary.decode(before.tolist())
            node["text"] = self.vocabulary.decode(ids[start : start + MAX_NODE_TOKENS].tolist())
        return node


def with_texts(tree: _Builtins, text_of: Callable[[bytes], str], show_texts: bool) -> _Builtins:
    """The tree, changed in place: each node has the ``text`` of its first tokens, or None.

    Args:
        show_texts: False: no node has a text. Nodes of salted namespaces never have one, since the
            caller need not know the salt.
    """
    for salted, node in _nodes(tree):
        ids = node.pop("first_token_ids")
        node["text"] = text_of(ids) if show_texts and not salted else None
    return tree


def _num_shown_tokens(tree: _Builtins) -> int:
    """Number of tokens to decode."""
    return sum(num_ids(node["first_token_ids"]) for _, node in _nodes(tree))


def _nodes(tree: _Builtins) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Each node, with True if it is of a salted namespace."""
    for namespace in tree["namespaces"]:
        pending = [
            *tree["above"],
            *namespace["children"],
        ]  # with nodes above, there is one namespace
        while pending:
            node = pending.pop()
            pending += node["children"]
            yield namespace["salted"], node
