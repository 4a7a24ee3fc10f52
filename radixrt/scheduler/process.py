"""The scheduler process: receives messages, absorbs results, plans steps and sends them; and
reports its load to a router: work that waits, in seconds, and the use of the KV pool."""

import argparse
import gc
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from radixrt.base.channels import Channels
from radixrt.base.child import take_replica_share
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.ipc import Inbox, Outbox, Poller, close_all
from radixrt.base.liveness.heartbeat import Heartbeat, work_limit_s
from radixrt.base.liveness.link import ReplicaDrains, SupervisorLink
from radixrt.joining.engine_end import IngressLink
from radixrt.joining.fingerprint import model_fingerprint
from radixrt.joining.tokenizer_link import TokenizerLink
from radixrt.kv.events import ReplayRequest
from radixrt.messages.adapters import AdapterRead
from radixrt.messages.answers import EngineInfo
from radixrt.messages.calls import SchedulerCall
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.messages.ids import unpack_ids
from radixrt.messages.images import DropImage, HurryImage, ImageLoaded, LoadImage
from radixrt.messages.links import ToScheduler, ToSchedulerFromWorker
from radixrt.messages.moves import PagesRead, PagesWritten
from radixrt.messages.replicas import (
    EventsReplayed,
    ReplayEvents,
    ReplicaDrained,
    ReplicaLoad,
    ReplicaReport,
)
from radixrt.messages.sequences import (
    ReleaseSequences,
    SequenceOutput,
    SequenceRefused,
    SequenceRequest,
    TokenBatch,
)
from radixrt.messages.stats import SchedulerStats
from radixrt.messages.steps import ExpertTokens, StepResult
from radixrt.scheduler.calls import Calls, DrainReplica
from radixrt.scheduler.disk.bundle import add_bundle
from radixrt.scheduler.disk.pages import DiskPages, open_pages
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.radix.kv_events import EventPublisher, start_publisher
from radixrt.scheduler.radix.pool_record import open_record
from radixrt.scheduler.request_log import RequestLog
from radixrt.scheduler.scheduler import Scheduler
from radixrt.scheduler.step_times import StepShape

log = logging.getLogger(__name__)

REPORT_S = 0.02
"""Time in which a change is reported, if no step takes longer. With a report for each step, short
requests to a small model take 12 % more CPU time."""


def replica_load(scheduler: Scheduler, received: int) -> ReplicaLoad:
    """The load after a step was planned."""
    slots, times, kv = scheduler.state.slots, scheduler.state.times, scheduler.state.kv
    running = np.flatnonzero(slots.in_use)
    rest = slots.known[running] - slots.planned[running]
    context = int(slots.planned[slots.is_decoding].sum())
    decode = StepShape(int(slots.is_decoding.sum()), context)
    by_token, by_pair = times.prefill_costs
    by_prompt_token = max(times.seconds_per_prompt_token, by_token)
    decode_s = times.seconds(decode)
    most_prefill_s = scheduler.state.limits.max_prefill_tokens * by_prompt_token
    prefill_s = min(times.prefill_seconds(decode), most_prefill_s)
    slowdown = 1 + decode_s / prefill_s if prefill_s > 0 else 1.0
    per_token_s = by_prompt_token * slowdown
    page_size, tree = scheduler.state.limits.page_size, kv.tree
    return ReplicaLoad(
        received=received,
        step_s=scheduler.seconds_in_flight,
        partial_s=(rest[rest > 0] * per_token_s).tolist(),
        waiting_s=scheduler.state.waiting.prompt_tokens * per_token_s,
        slowdown=slowdown,
        seconds_per_token=by_token,
        seconds_per_pair=by_pair,
        waiting=len(scheduler.state.waiting),
        context_tokens=int(np.maximum(slots.planned, slots.known)[running].sum()),
        held_tokens=page_size
        * (kv.allocator.num_pages - kv.allocator.num_free - tree.num_evictable_pages),
        free_tokens=page_size * kv.allocator.num_free,
        pool_tokens=page_size * kv.allocator.num_pages,
    )


@dataclass
class LoadReports:
    """Tells a router the load and the changes of the cache: after a long step, after the last one,
    and of short steps together."""

    scheduler: Scheduler
    kv_events: EventPublisher
    """The changes; where programs outside listen to them too, each step is reported."""
    send: Callable[[ReplicaReport], None]
    clock: Callable[[], float] = time.monotonic
    due_at: float | None = None
    """None: the router knew everything after the last step."""

    def after_step(self, received: int) -> None:
        """Report, unless the steps in flight end before the report is due."""
        scheduler, now = self.scheduler, self.clock()
        if self.due_at is None:
            self.due_at = now + REPORT_S
        if (
            scheduler.num_in_flight
            and now + scheduler.seconds_in_flight < self.due_at
            and not self.kv_events.is_public
        ):
            return
        self.due_at = None
        batch, stream = self.kv_events.publish(), self.kv_events.stream
        self.send(
            ReplicaReport(
                load=replica_load(scheduler, received),
                stream=stream.name,
                sequence=stream.num_batches,
                events=batch or b"",
            )
        )


MAX_STEPS_IN_FLIGHT = 2


class SchedulerProcess:
    """Connects a :class:`Scheduler` with the tokenizer process and the workers."""

    def __init__(
        self,
        config: ServerConfig,
        channels: Channels,
        supervisor: SupervisorLink,
        record_fd: int = -1,
    ) -> None:
        """
        Args:
            record_fd: see :func:`open_record`.
        """
        self._from_worker: Inbox[ToSchedulerFromWorker] = Inbox(
            channels.address("worker", "scheduler"), ToSchedulerFromWorker
        )
        self._poller = Poller(self._from_worker)
        self._tokenizer: TokenizerLink | IngressLink
        if config.join is None:
            self._tokenizer = TokenizerLink(channels, self._poller, self._forget_tokenizer)
        else:
            model = model_fingerprint(config)
            self._tokenizer = IngressLink(
                config, channels, model, self._poller, self._forget_tokenizer, supervisor
            )
        self._to_workers = [
            Outbox(channels.address("scheduler", f"worker{rank}")) for rank in range(config.tp)
        ]
        self._heartbeat = Heartbeat(channels.heartbeat_file("scheduler"))
        self._step_timeout_s = work_limit_s(config.step_timeout)
        self._new_tokens = 0
        """Since the last heartbeat."""
        self._max_in_flight = 1 if config.debug_disable_overlap_schedule else MAX_STEPS_IN_FLIGHT
        info = self._wait_for_worker()
        if config.dp > 1 and info.device == "cpu":
            take_replica_share(config.dp)
        disk = open_disk(config, info, channels)
        self._disk_is_missing = config.cache_dir is not None and disk is None
        self.scheduler = Scheduler(
            SchedulerLimits.from_config(config, info),
            disk=disk,
            kept_adapters=channels.kept_adapters,
        )
        self._calls = Calls(
            self.scheduler,
            self._tokenizer.send,
            self._stats,
            lambda: supervisor.tell(ReplicaDrains()),
            self._note_adapters,
        )
        log = config.request_log
        file = None if log is None else request_log_file(log, channels.replica)
        kept = request_log_file(str(channels.run_dir / "request_log"), channels.replica)
        self._log = RequestLog(file, time.monotonic, kept)
        kv = self.scheduler.state.kv
        self._kv_events = start_publisher(
            config, kv.tree, kv.allocator.num_pages, channels.replica or 0, kv.states
        )
        self._take_over(record_fd, info)  # now: the publisher hears of what is taken over
        self._reports: LoadReports | None = None
        if config.is_routed and self._kv_events is not None:
            self._reports = LoadReports(self.scheduler, self._kv_events, self._tokenizer.send)
        self._received = 0
        """Sequences from the tokenizer process."""
        self._expert_tokens = ExpertTokens(layers=0, counts=b"")
        if self._kv_events is not None and self._kv_events.socket is not None:
            self._poller.add(self._kv_events.socket)
        self._info = info
        self._tokenizer.join(info)

    def _take_over(self, record_fd: int, info: EngineInfo) -> None:
        """Take over the pages of a shared pool that the last engine has left."""
        kv = self.scheduler.state.kv
        num_pages, num_ranks = kv.allocator.num_pages, len(self._to_workers)
        record = open_record(record_fd, info.pool_id, num_pages, info.page_size, num_ranks)
        if record is not None and (kept := kv.keep_record(record)):
            log.info("Took over %d tokens of KV from the last engine.", kept * info.page_size)

    def _note_adapters(self) -> None:
        """Let the next tokenizer process hear of the adapters that there are now."""
        self._info = msgspec.structs.replace(self._info, adapters=self.scheduler.adapters.infos)
        self._tokenizer.note(self._info)

    def _wait_for_worker(self) -> EngineInfo:
        while True:
            message = self._from_worker.receive()
            if isinstance(message, EngineInfo):
                return message

    def run(self) -> None:
        """Loop forever. Sleeps while nothing can be planned until a message arrives."""
        while True:
            self._heartbeat.promise(self._step_timeout_s, done=self._new_tokens)
            self._new_tokens = 0
            working = self._calls.is_working
            self._poller.wait(0 if working else self._seconds_to_next_deadline())
            for request in self._tokenizer.receive_waiting():
                self._handle(request)
            for result in self._from_worker.receive_waiting():
                self._absorb(result)
            self._drop_expired()
            self._fill_pipeline()
            self._calls.work()
            if self._reports is not None:  # last: the workers have their next step by now
                self._reports.after_step(self._received)
            elif self._kv_events is not None:
                self._kv_events.publish()

    def announce_drain(self) -> None:
        """Let the requests go on in other replicas."""
        self._tokenizer.send(ReplicaDrained())
        close_all()

    def _forget_tokenizer(self) -> None:
        """The tokenizer process is lost: its sequences go on elsewhere, or the next one sends them
        again."""
        for seq_id in self.scheduler.forget_all():
            self._log.ended(seq_id)
        self._calls.forget()
        self._received = 0

    def _absorb(self, message: ToSchedulerFromWorker) -> None:
        match message:
            case StepResult():
                self._send_tokens(self.scheduler.absorb(message))
            case AdapterRead():
                self.scheduler.adapters.read(message)
            case ExpertTokens():
                self._expert_tokens = message
            case PagesWritten() | PagesRead():
                self.scheduler.moved(message)
            case GrammarLoaded() | ImageLoaded():
                if refused := self.scheduler.loaded(message):
                    self._refuse(refused)

    def _send_tokens(self, batch: TokenBatch) -> None:
        self._tokenizer.send(batch)
        self._new_tokens += batch.num_tokens
        self._log.answered(batch)

    def _add(self, request: SequenceRequest) -> None:
        self._received += 1
        self._log.arrived(request)
        if (refused := self.scheduler.add(request)) is not None:
            self._refuse([refused])
        if (given := self.scheduler.answers.take_outputs()) is not None:
            self._send_tokens(given)

    def _refuse(self, refused: list[SequenceRefused]) -> None:
        """Report sequences that were not queued."""
        self._tokenizer.send(TokenBatch(refused=refused))
        for sequence in refused:
            self._log.refused(sequence.seq_id)

    def _release(self, message: ReleaseSequences) -> None:
        seq_ids = unpack_ids(message.seq_ids)
        self.scheduler.release(seq_ids, complete=message.complete)
        for seq_id in seq_ids.tolist():
            self._log.ended(seq_id)

    def _fill_pipeline(self) -> None:
        scheduler = self.scheduler
        for order in scheduler.take_orders():
            for worker in self._to_workers:
                worker.send(order)
        while scheduler.num_in_flight < self._max_in_flight:
            begin = time.perf_counter()
            plan = scheduler.plan()
            for move in scheduler.take_moves():
                for worker in self._to_workers:
                    worker.send(move)
            if plan is None:
                return
            scheduler.state.counters.plan_seconds.observe(time.perf_counter() - begin)
            for worker in self._to_workers:
                worker.send(plan)
            if (begun := scheduler.take_begun()) is not None:
                self._tokenizer.send(begun)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case LoadGrammar():
                self.scheduler.grammars.load(message)
            case DropGrammar():
                self.scheduler.grammars.drop(message)
            case LoadImage():
                self.scheduler.images.load(message)
            case HurryImage():
                self.scheduler.images.hurry(message)
            case DropImage():
                self.scheduler.images.drop(message)
            case SequenceRequest():
                self._add(message)
            case ReleaseSequences():
                self._release(message)
            case SchedulerCall():
                self._calls.take(message)
            case ReplayEvents() if self._kv_events is not None:
                request = ReplayRequest(stream=message.stream, sequence=message.sequence)
                self._tokenizer.send(EventsReplayed(self._kv_events.stream.replay(request)))

    def _stats(self) -> SchedulerStats:
        malformed = self._tokenizer.malformed_frames + self._from_worker.malformed_frames
        queued_s = replica_load(self.scheduler, self._received).queued_s
        stats = msgspec.structs.replace(
            self.scheduler.stats(malformed),
            queued_prefill_s=queued_s,
            request_log_dropped=self._log.dropped,
            **({"disk_stopped": 1} if self._disk_is_missing else {}),
            **expert_load(self._expert_tokens),
        )
        return stats if self._kv_events is None else self._kv_events.add_stats(stats)

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = self.scheduler.open.next_deadline()
        times = [self.scheduler.state.kv.leases.seconds_to_next_expiry()]
        times.append(self.scheduler.open.queue_time.seconds_to_next_overdue())
        if not self.scheduler.num_in_flight:
            times.append(self.scheduler.state.idle.seconds_to_rest())
        times.append(None if deadline is None else max(0.0, deadline - time.time()))
        return min((seconds for seconds in times if seconds is not None), default=None)

    def _drop_expired(self) -> None:
        if dropped := self.scheduler.drop_expired(time.time()):
            outputs = {seq_id: SequenceOutput(finished=end) for seq_id, end in dropped.items()}
            self._send_tokens(TokenBatch(outputs=outputs))
        if refused := self.scheduler.refuse_overdue():
            self._refuse(refused)


def open_disk(config: ServerConfig, info: EngineInfo, channels: Channels) -> DiskPages | None:
    """The pages on disk, at the first start with those of a bundle. A later start, after the death
    of a worker or scheduler, goes on without them where they cannot be opened: the server lives.

    Raises:
        ConfigError: at the first start, they or the bundle cannot be opened.
    """
    is_first = channels.start == 0
    try:
        disk = open_pages(config, info, channels.replica or 0)
        if is_first and disk is not None and config.cache_bundle is not None:
            add_bundle(Path(config.cache_bundle).expanduser(), disk, info.kv_parts)
    except ConfigError as error:
        if is_first:
            raise
        log.error("--cache-dir is not used until the engine starts again: %s", error)
        return None
    return disk


def expert_load(tokens: ExpertTokens) -> dict[str, dict[str, float]]:
    """The fields of ``SchedulerStats`` about experts."""
    if not tokens.layers:
        return {}
    counts = np.frombuffer(tokens.counts, dtype=np.int64).reshape(tokens.layers, -1)
    means, most = counts.mean(axis=1).tolist(), counts.max(axis=1).tolist()
    return {
        "expert_tokens": {str(expert): n for expert, n in enumerate(counts.sum(axis=0).tolist())},
        "expert_imbalance": {str(i): most[i] / mean for i, mean in enumerate(means) if mean},
    }


def request_log_file(path: str, replica: int | None) -> Path:
    """Each replica writes a file of its own: FILE, FILE.1, FILE.2, …"""
    return Path(f"{path}.{replica}" if replica else path)


def run_scheduler(
    config: ServerConfig,
    channels: Channels,
    arguments: argparse.Namespace,
    supervisor: SupervisorLink,
) -> None:
    """Entry point of ``python -m radixrt.scheduler``."""
    process = SchedulerProcess(config, channels, supervisor, arguments.kept_fd)
    gc.freeze()  # objects made at start-up live to the end, so the collector need not visit them
    if config.is_routed:
        signal.signal(signal.SIGTERM, _drain)
    try:
        process.run()
    except DrainReplica:
        process.announce_drain()


def _drain(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise DrainReplica
