"""A scheduler that has no engine: it answers with scripted tokens and remembers what it was
told."""

import dataclasses
import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from radixrt.base.channels import Channels
from radixrt.base.config import ServerConfig
from radixrt.base.ipc import Poller
from radixrt.base.liveness.link import SupervisorLink
from radixrt.joining.engine_end import IngressLink
from radixrt.joining.tokenizer_link import TokenizerLink
from radixrt.messages.answers import AnswerReport, EngineInfo, RequestFailed
from radixrt.messages.cache_explanation import CacheFacts
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.cache_tree import (
    CacheLease,
    CacheNamespace,
    CacheNode,
    CacheTree,
    CacheTreeNode,
)
from radixrt.messages.calls import (
    AnySchedulerCall,
    CacheFactsCall,
    CacheMatch,
    CacheNodeCall,
    CacheTreeCall,
    CallReply,
    FlushCacheCall,
    LeaseGranted,
    MatchCall,
    PinCall,
    ReleaseCacheCall,
    StatsCall,
    TenantStatsCall,
)
from radixrt.messages.ids import num_ids, pack_ids, unpack_ids
from radixrt.messages.links import ToScheduler
from radixrt.messages.replicas import ReplicaLoad, ReplicaReport
from radixrt.messages.sequences import (
    PositionLogprobs,
    ReleaseSequences,
    SequenceRefused,
    SequenceRequest,
    TokenBatch,
)
from radixrt.messages.stats import SchedulerStats, StructuredStats, TenantStats, TimeHistogram

CACHED_TOKENS, CACHE_WRITE_TOKENS = 7, 2
"""Of every sequence."""

KEPT_MASS = 0.25
"""Of every token."""

VECTOR = (3.0, 0.0, 4.0, 12.0)
"""Of every prompt, until a test sets another."""

Script = Callable[[SequenceRequest], list[int]]


def engine_info(**changes: object) -> EngineInfo:
    info = EngineInfo(
        context_length=512,
        vocab_size=420,
        kv_pool_tokens=2048,
        page_size=16,
        kv_bytes_per_token=1024,
        num_parameters=1,
        weight_bytes=4,
        dtype="float32",
        device="cpu",
        attention_backend="torch_reference",
        architecture="FakeForCausalLM",
        eos_token_ids=(1,),
    )
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    return EngineInfo(**(fields | changes))


@dataclasses.dataclass
class _Running:
    request: SequenceRequest
    script: list[int]
    at: int = 0


class FakeScheduler:
    """Serves in a thread of its own, a token for each running sequence a step.

    Attributes:
        script: the tokens to answer a request with; they are repeated until the request's limit.
        vector: the numbers of a request that asks for them.
        refuse: given a request, the refusal to send instead of tokens.
        released: sequence ids that were released while they ran.
        requests: all that came in.
        call_s: how long it takes to answer a call about the KV cache.
        cache_calls: all calls about the KV cache that came in.
    """

    def __init__(
        self,
        channels: Channels,
        info: EngineInfo,
        step_s: float = 0.0,
        join: ServerConfig | None = None,
    ) -> None:
        """
        Args:
            join: settings of an engine that joins an ingress; None: the tokenizer process is on
                this machine.
        """
        self._poller = Poller()
        self._tokenizer: TokenizerLink | IngressLink
        if join is None:
            self._tokenizer = TokenizerLink(channels, self._poller, self._forget)
        else:
            self._tokenizer = IngressLink(
                join, channels, "a model", self._poller, self._forget, SupervisorLink()
            )
        self._info = info
        self.step_s = step_s
        self.script: Script = lambda request: unpack_ids(request.token_ids).tolist()
        self.refuse: Callable[[SequenceRequest], SequenceRefused | None] = lambda request: None
        self.vector: Callable[[SequenceRequest], Sequence[float]] = lambda request: VECTOR
        self.requests: list[SequenceRequest] = []
        self.released: list[int] = []
        self.cache_calls: list[AnySchedulerCall] = []
        self.flushes = 0
        self.call_s = 0.0
        self.paused = threading.Event()
        self._running: dict[int, _Running] = {}
        self._has_step_in_flight = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._tokenizer.close()

    def _run(self) -> None:
        self._tokenizer.join(self._info)
        while not self._stop.is_set():
            self._poller.wait(0.0 if self._running else 0.01)
            if isinstance(self._tokenizer, IngressLink):
                self._tokenizer.send(ReplicaReport(load=ReplicaLoad(), stream="", sequence=0))
            for message in self._tokenizer.receive_waiting():
                self._handle(message)
            if self._has_step_in_flight:
                self._tokenizer.send(TokenBatch())
                self._has_step_in_flight = False
            if self._running and not self.paused.is_set():
                self._step()
                time.sleep(self.step_s)

    def _forget(self) -> None:
        """As a scheduler with a step in flight, whose result has no tokens then."""
        self._running.clear()
        self._has_step_in_flight = True

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case SequenceRequest():
                self.requests.append(message)
                if refusal := self.refuse(message):
                    self._tokenizer.send(TokenBatch(refused=[refusal]))
                else:
                    self._running[message.seq_id] = _Running(message, self.script(message))
            case ReleaseSequences():
                for seq_id in unpack_ids(message.seq_ids).tolist():
                    if self._running.pop(seq_id, None) is not None:
                        self.released.append(seq_id)
            case FlushCacheCall():
                self.flushes += 1
                self._tokenizer.send(CallReply(call_id=message.call_id, value=3))
            case PinCall() | ReleaseCacheCall() | CacheTreeCall() | CacheNodeCall() | MatchCall():
                self.cache_calls.append(message)
                time.sleep(self.call_s)
                self._tokenizer.send(_cache_reply(message))
            case CacheFactsCall():
                facts = CacheFacts(cached_tokens=CACHED_TOKENS, reusable_tokens=CACHED_TOKENS)
                self._tokenizer.send(CallReply(call_id=message.call_id, value=facts))
            case TenantStatsCall():
                stats = dict.fromkeys(TenantStats.__struct_fields__, 2)
                self._tokenizer.send(CallReply(call_id=message.call_id, value=stats))
            case StatsCall():
                self._tokenizer.send(CallReply(call_id=message.call_id, value=self._stats()))

    def _step(self) -> None:
        batch = TokenBatch()
        for seq_id, running in list(self._running.items()):
            sampling, output = running.request.sampling, batch.output_of(seq_id)
            if sampling.max_tokens == 0:
                output.started = _report(running.request)
                pooled = running.request.options.pool is not None
                reason = "stop" if pooled else "length"
                output.finished = _report(running.request, finish_reason=reason)
                if pooled:
                    output.vector = array("f", self.vector(running.request)).tobytes()
                del self._running[seq_id]
                continue
            token = running.script[running.at % len(running.script)]
            output.token_ids.append(token)
            if running.at == 0:
                output.started = _report(running.request)
                if sampling.prompt_logprobs is not None:
                    ids = unpack_ids(running.request.token_ids).tolist()
                    output.prompt_logprobs += [
                        _row(token_id, sampling.prompt_logprobs)
                        for token_id in ids[max(1, sampling.prompt_logprobs_start) :]
                    ]
            if sampling.logprobs is not None or sampling.kept_mass:
                row = _row(token, sampling.logprobs or 0)
                if sampling.logprobs is None:
                    row = PositionLogprobs(b"", [])
                mass = math.log(KEPT_MASS) if sampling.kept_mass else None
                output.logprobs.append(msgspec.structs.replace(row, log_kept_mass=mass))
            running.at += 1
            ends = token in self._info.eos_token_ids and not sampling.ignore_eos
            if ends or token in sampling.stop_token_ids:
                stop = token if token in sampling.stop_token_ids else None
                output.finished = _report(running.request, finish_reason="stop", stop_reason=stop)
                del self._running[seq_id]
            elif running.request.num_output + running.at == sampling.max_tokens:
                output.finished = _report(running.request, finish_reason="length")
                del self._running[seq_id]
        self._tokenizer.send(batch)

    def _stats(self) -> SchedulerStats:
        histogram = TimeHistogram(bounds=[0.001, 0.01], counts=[2, 1, 0], total=0.004)
        counts: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__, 1)
        counts |= {name: {"tree": 1} for name in ("drafted_tokens", "accepted_draft_tokens")}
        counts |= {"expert_tokens": {"0": 1}, "expert_imbalance": {"0": 1.0}}
        counts |= {"running": len(self._running), "replicas": {}, "structured": StructuredStats()}
        counts |= {"prompt_tokens": 100, "cached_tokens": 40, "pages_total": 128}
        return SchedulerStats(**(counts | {"step_seconds": histogram, "plan_seconds": histogram}))


def _report(request: SequenceRequest, **end: object) -> AnswerReport:
    """Of an answer's begin, or of its end."""
    return AnswerReport(
        prompt_tokens=num_ids(request.token_ids) - request.num_output,
        cached_tokens=CACHED_TOKENS,
        cache_write_tokens=CACHE_WRITE_TOKENS,
        queued_s=0.001,
        prefill_s=0.002,
        total_s=0.5 if end else 0.0,
        **end,  # type: ignore[arg-type]
    )


def _cache_reply(call: AnySchedulerCall) -> CallReply:
    """Every prompt is pinned; the lease "gone" is not there; the tree has a prompt with a salt and
    one without.

    Node 7 is alice's prompt with a lease of hers, node 8 has a salt, and there is no other.
    """
    match call:
        case CacheNodeCall(node=7 | 8):
            node = CacheNode(
                root=CacheRoot("key:alice", "secret-salt" * (call.node == 8)),
                token_ids=pack_ids([300, 301] * 16),
                num_tokens=16,
                age_s=2.0,
                idle_s=1.0,
                uses=3,
                running=0,
                leases=[CacheLease(lease="secret-lease", tenant="alice", expires_in_s=60.0)],
            )
            return CallReply(call_id=call.call_id, value=node)
        case CacheNodeCall():
            gone = RequestFailed(request_id="", message="This node has left.", status=404)
            return CallReply(call_id=call.call_id, error=gone)
        case PinCall():
            pinned = len(unpack_ids(call.token_ids))
            value = LeaseGranted(lease="lease-1", pinned_tokens=pinned, expires_in_s=call.ttl_s)
            return CallReply(call_id=call.call_id, value=value)
        case MatchCall():
            matches = [
                CacheMatch(prompt_tokens=num_ids(one), cached_tokens=0) for one in call.token_ids
            ]
            return CallReply(call_id=call.call_id, value=matches)
        case ReleaseCacheCall(lease="gone"):
            failed = RequestFailed(request_id="", message="There is no lease gone.", status=404)
            return CallReply(call_id=call.call_id, error=failed)
        case ReleaseCacheCall():
            return CallReply(call_id=call.call_id, value=32)
    shown = CacheTreeNode(
        node=7,
        first_token_ids=pack_ids([300, 301]),
        num_tokens=32,
        total_tokens=32,
        total_nodes=1,
        locked=True,
        pinned=True,
        idle_s=1.5,
    )
    namespaces = [
        CacheNamespace(salted=salted, total_tokens=32, total_nodes=1, children=[shown])
        for salted in (False, True)
    ]
    tree = CacheTree(page_size=16, total_tokens=64, total_nodes=2, namespaces=namespaces)
    return CallReply(call_id=call.call_id, value=tree)


def _row(token_id: int, top: int) -> PositionLogprobs:
    """Minus a tenth of its rank for each token."""
    ids = [token_id, *range(300, 300 + top)]
    return PositionLogprobs(pack_ids(ids), [-0.1 * rank for rank in range(len(ids))])
