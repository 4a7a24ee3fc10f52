"""Replies to the calls of the api: by the tokenizer process itself, or together with the scheduler."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import msgspec

from radixrt.base.errors import RequestError
from radixrt.messages.cache_explanation import SHOWN_TOKENS, CacheExplanation, CacheFacts
from radixrt.messages.calls import (
    CacheFactsCall,
    CacheNodeCall,
    CacheTreeCall,
    Call,
    CompileCall,
    DetokenizeCall,
    DrainReplicaCall,
    ExplainCacheCall,
    FlushCacheCall,
    MatchCall,
    MatchTokensCall,
    PinCall,
    PinTokensCall,
    ReleaseCacheCall,
    SchedulerCall,
    StatsCall,
    TenantStatsCall,
    TokenizeCall,
)
from radixrt.messages.ids import PackedIds, num_ids, pack_ids, unpack_ids
from radixrt.messages.replies import (
    CallReply,
    Tokenized,
)
from radixrt.messages.requests import NO_TENANT, split_salt
from radixrt.tokenizer.constraints.manager import ConstraintManager
from radixrt.tokenizer.explain.explainer import Explainer
from radixrt.tokenizer.explain.records import PromptRecord
from radixrt.tokenizer.fair_queue import FairQueue
from radixrt.tokenizer.in_flight import Send, failure
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.node_texts import NodeTexts
from radixrt.tokenizer.prompt.prompts import PromptEncoder, size_in_chars
from radixrt.tokenizer.vocabulary import Vocabulary

_Tree = dict[str, Any]
"""A :class:`radixrt.messages.cache_tree.CacheTree` as builtins."""

_CALLS = ""
"""Key of all calls of a tenant in the fair queue: together they count as one request."""


MOST_NODE_TOKENS = 1024
"""Of a node's edge, and of the tokens before it, that are shown as text."""


@dataclasses.dataclass(eq=False)
class Calls:
    """The calls of one engine."""

    vocabulary: Vocabulary
    encoder: PromptEncoder
    limits: Limits
    constraints: ConstraintManager
    queue: FairQueue
    shows_cache_texts: bool
    explainer: Explainer
    node_texts: NodeTexts
    to_api: Send
    to_scheduler: Callable[[SchedulerCall], None]
    _tasks: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    _passed_on: dict[int, Call] = dataclasses.field(default_factory=dict)
    """Calls that the scheduler replies to, with something added by this process."""

    def take(self, call: Call) -> None:
        """Start the work of a call."""
        match call:
            case TokenizeCall():
                size = size_in_chars(call.prompt)
                self._enqueue(call, size, lambda: self._tokenize(call, size))
            case DetokenizeCall():
                size = num_ids(call.token_ids)
                self._enqueue(call, size, lambda: self._detokenize(call))
            case CompileCall():
                advising = self.constraints.compile_ahead(call.constraint, call.tenant.name)
                self._spawn(self._reply(call.call_id, advising))
            case PinCall():
                self._spawn(self._reply(call.call_id, self._pin(call)))
            case MatchCall():
                self._spawn(self._reply(call.call_id, self._match(call)))
            case FlushCacheCall() | ReleaseCacheCall() | TenantStatsCall() | DrainReplicaCall():
                self.to_scheduler(call)
            case CacheTreeCall() | CacheNodeCall() | StatsCall():
                self._passed_on[call.call_id] = call
                self.to_scheduler(call)
            case ExplainCacheCall():
                self._ask_for_facts(call)

    def pass_on(self, reply: CallReply) -> None:
        """Send a reply of the scheduler to the api, with texts and counters of this process added."""
        call = self._passed_on.pop(reply.call_id, None)
        if reply.error is None and isinstance(call, CacheTreeCall):
            tree = reply.value
            shows_texts = self.shows_cache_texts and call.with_texts
            work = partial(with_texts, tree, self.node_texts.of, shows_texts)
            self._enqueue(call, _num_shown_tokens(tree), work)
            return
        if reply.error is None and isinstance(call, ExplainCacheCall):
            facts = msgspec.convert(reply.value, CacheFacts)
            self._enqueue(call, SHOWN_TOKENS, lambda: self._explain(call, facts))
            return
        if reply.error is None and isinstance(call, CacheNodeCall):
            self._enqueue(call, 2 * MOST_NODE_TOKENS, partial(self._with_text, reply.value))
            return
        if reply.error is None and isinstance(call, StatsCall):
            reply.value["structured"] = msgspec.to_builtins(self.constraints.stats())
        self.to_api(reply)

    def _enqueue(
        self,
        call: TokenizeCall | DetokenizeCall | CacheTreeCall | CacheNodeCall | ExplainCacheCall,
        size: int,
        work: Callable[[], Any],
    ) -> None:
        """Put the work of a call, of about ``size`` characters, into the fair queue."""
        tenant = getattr(call, "tenant", NO_TENANT)
        self._spawn(self._reply(call.call_id, self.queue.run(tenant.name, _CALLS, size, work)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, call_id: int, work: Awaitable[Any]) -> None:
        """Reply with the result of the work; after None the scheduler replies."""
        try:
            if (value := await work) is not None:
                self.to_api(
                    CallReply(call_id=call_id, value=value)
                )  # it may hold what can't be sent
        except Exception as error:
            self.to_api(CallReply(call_id=call_id, error=failure("", error)))

    # ------------------------------------------------------------ one call each

    def _tokenize(self, call: TokenizeCall, size: int) -> Tokenized:
        self.limits.check_call(size, is_text=True)
        of_any_length = dataclasses.replace(self.limits, context_length=2**31)
        text, token_ids = self.encoder.encode(call.prompt, of_any_length, call.cache_salt)
        prompt_text = self.vocabulary.decode(token_ids) if text is None else text
        return Tokenized(token_ids=token_ids, prompt=prompt_text)

    def _detokenize(self, call: DetokenizeCall) -> str:
        ids = unpack_ids(call.token_ids)
        self.limits.check_call(len(ids), is_text=False)
        self.limits.check_token_ids(ids)
        return self.vocabulary.decode(ids.tolist(), call.skip_special_tokens)

    def _record(self, call: ExplainCacheCall) -> PromptRecord:
        """Raises:
        RequestError: the tenant has sent no such request, or it is too long ago.
        """
        found = self.explainer.records.find(call.tenant.name, call.request_id)
        if found is None or not found.seq_ids:
            raise RequestError(
                "This request is unknown, or too long ago: only the last ones can be explained.",
                status=404,
            )
        return found

    def _ask_for_facts(self, call: ExplainCacheCall) -> None:
        try:
            facts_call = CacheFactsCall(call.call_id, self._record(call).seq_ids[0])
        except RequestError as error:
            self.to_api(CallReply(call_id=call.call_id, error=failure("", error)))
        else:
            self._passed_on[call.call_id] = call
            self.to_scheduler(facts_call)

    def _explain(self, call: ExplainCacheCall, facts: CacheFacts) -> CacheExplanation:
        explanation = self.explainer.explain(self._record(call), facts, call.with_texts)
        return msgspec.structs.replace(explanation, request_id=call.request_id)

    def _with_text(self, node: dict[str, Any]) -> dict[str, Any]:
        """A CacheNode as builtins, with the text of its edge and of the tokens before it, if they may be shown."""
        _, own_salt = split_salt(node["cache_salt"])
        if self.shows_cache_texts and not own_salt:
            ids = unpack_ids(node["token_ids"])
            start = len(ids) - node["num_tokens"]
            before = ids[max(0, start - MOST_NODE_TOKENS) : start]
            node["text_before"] = self.vocabulary.decode(before.tolist())
            node["text"] = self.vocabulary.decode(ids[start : start + MOST_NODE_TOKENS].tolist())
        return node

    async def _pin(self, call: PinCall) -> None:
        """Send the scheduler the tokens of a prompt to pin."""
        _, token_ids = await self.queue.run(
            call.tenant.name,
            _CALLS,
            size_in_chars(call.prompt),
            lambda: self.encoder.encode(call.prompt, self.limits, call.cache_salt),
        )
        self.to_scheduler(
            PinTokensCall(
                call_id=call.call_id,
                token_ids=pack_ids(token_ids),
                cache_salt=call.cache_salt,
                ttl_s=call.ttl_s,
                lease=call.lease,
                tenant=call.tenant,
            )
        )

    async def _match(self, call: MatchCall) -> None:
        """Send the scheduler the tokens of prompts to look for. Prompts of any length are looked for."""
        of_any_length = dataclasses.replace(self.limits, context_length=2**31)
        size = sum(map(size_in_chars, call.prompts))
        self.limits.check_call(size, is_text=True)

        def encode() -> list[PackedIds]:
            encoded = (
                self.encoder.encode(one, of_any_length, call.cache_salt) for one in call.prompts
            )
            return [pack_ids(token_ids) for _, token_ids in encoded]

        prompts = await self.queue.run(call.tenant.name, _CALLS, size, encode)
        self.to_scheduler(
            MatchTokensCall(call_id=call.call_id, prompts=prompts, cache_salt=call.cache_salt)
        )


def with_texts(tree: _Tree, text_of: Callable[[bytes], str], show_texts: bool) -> _Tree:
    """The tree, changed in place: each node has the ``text`` of its first tokens, or None.

    Args:
        show_texts: False: no node has a text. Nodes of salted namespaces never have one, since the caller need not
            know the salt.
    """
    for salted, node in _nodes(tree):
        ids = node.pop("first_token_ids")
        node["text"] = text_of(ids) if show_texts and not salted else None
    return tree


def _num_shown_tokens(tree: _Tree) -> int:
    """Number of tokens to decode."""
    return sum(num_ids(node["first_token_ids"]) for _, node in _nodes(tree))


def _nodes(tree: _Tree) -> Iterator[tuple[bool, dict[str, Any]]]:
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
