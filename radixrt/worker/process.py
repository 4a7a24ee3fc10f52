"""The worker process: executes step plans in order, and sends their tokens as these arrive."""

import argparse
import dataclasses
import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist

from radixrt.base.channels import Channels
from radixrt.base.child import take_replica_share
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.ipc import Inbox, Outbox
from radixrt.base.liveness.heartbeat import Heartbeat, work_limit_s
from radixrt.base.liveness.link import SupervisorLink
from radixrt.base.token_bytes import give_memory_back
from radixrt.device.device import make_device
from radixrt.layers.parallel import TensorParallel
from radixrt.messages.images import ImageLoaded
from radixrt.messages.links import PageMove, ToWorker
from radixrt.messages.steps import ExpertTokens, StepPlan, StepResult
from radixrt.models.checkpoint import read_config
from radixrt.models.registry import check_architecture, is_encoder
from radixrt.worker.build import build_encoder, build_runner
from radixrt.worker.images import QUIET_S
from radixrt.worker.kv.page_mover import PageMover
from radixrt.worker.pooling import EncoderRunner
from radixrt.worker.runner import ModelRunner
from radixrt.worker.threads import take_share
from radixrt_kernels.memory import keep_freed_memory

LOOK_AGAIN_S = 20e-6
"""Seconds between two polls of the socket and of the device. No system call waits for both."""


EXPERTS_EVERY_S = 1.0
"""Seconds between two reports of the experts' tokens."""
PIECE_S = 0.005
"""Seconds of the vision tower between two looks for orders while nothing else is to do."""


class WorkerProcess:
    """One rank: a model runner between two channels."""

    def __init__(
        self, config: ServerConfig, channels: Channels, rank: int, kept_fd: int = -1
    ) -> None:
        """
        Args:
            kept_fd: see :func:`build_runner`.
        """
        self._inbox: Inbox[ToWorker] = Inbox(
            channels.address("scheduler", f"worker{rank}"), ToWorker
        )
        self._to_scheduler = channels.address("worker", "scheduler")
        self._outbox = Outbox(self._to_scheduler)
        self._mover: PageMover | None = None
        self._rank, self._num_ranks = rank, config.tp
        self._answers = rank == 0
        self._heartbeat = Heartbeat(channels.heartbeat_file("worker", rank))
        self._step_timeout_s = work_limit_s(config.step_timeout)
        place = pick_device(config.device, rank + (channels.replica or 0) * config.tp)
        if place.type == "cpu":
            take_share(config, rank, channels.replica or 0)
        elif config.numa:
            raise ConfigError("--numa binds workers on CPUs; on a GPU, leave it out.")
        config = replica_share(config, place)
        tp = join_ranks(channels.folder, rank, config.tp, place, config.expert_groups)
        from_threads = Outbox(self._to_scheduler)
        device, tokenizer_file = make_device(place), channels.tokenizer_file
        self._runner: ModelRunner | EncoderRunner
        if is_encoder(check_architecture(read_config(Path(config.model_path)))):
            self._runner, info = build_encoder(config, device)
        else:
            self._runner, info = build_runner(
                config,
                device,
                tp,
                tokenizer_file,
                from_threads.send,
                channels.kept_adapters,
                kept_fd,
            )
        self._counts_experts = self._answers and config.expert_metrics
        self._reported: ExpertTokens | None = None
        self._next_report_s = 0.0
        if self._answers:
            self._outbox.send(info)

    def run(self) -> None:
        """Execute plans until the process is ended."""
        while True:
            message, idle_s = self._next_order()
            if isinstance(message, PageMove):
                self._move(message)
            elif isinstance(message, StepPlan):
                self._beat()
                results = self._runner.step(message, idle_s)
                self._answer(results)
                for result in results:
                    self._heartbeat.worked(result.step_s)
                if (images := self._runner.images) is not None:
                    images.rest(QUIET_S)
                    if images.has_work:
                        self._send_loaded(images.work(images.beside_steps_s))
            else:
                self._runner.order(message)

    def _move(self, order: PageMove) -> None:
        """Move pages between memory and disk."""
        if self._mover is None:
            assert isinstance(self._runner, ModelRunner), "an encoder keeps no KV"
            report = Outbox(self._to_scheduler).send
            self._mover = PageMover(
                self._runner.kv_caches,
                report,
                self._rank,
                self._num_ranks,
                self._runner.kept_states,
            )
        self._mover.take(order)

    def _next_order(self) -> tuple[ToWorker, float]:
        """Wait for the scheduler's next message, and answer a step that the device finishes before
        it comes.

        Returns:
            the message, and the seconds that the device was idle before it came
        """
        while (step := self._runner.in_flight) is not None:
            message = self._inbox.receive_now()
            if message is not None:
                return message, 0.0
            if step.download.is_ready():
                self._answer(self._runner.collect())
            else:
                time.sleep(LOOK_AGAIN_S)
        while (images := self._runner.images) is not None:
            if not (images.has_work or images.has_idle_work):
                break
            message = self._inbox.receive_now()
            if message is not None:
                return message, 0.0
            self._beat()
            if images.has_work:
                self._send_loaded(images.work(PIECE_S))
            elif (rest_s := images.seconds_to_rest()) > 0:
                self._inbox.wait(rest_s)
            else:
                self._send_loaded(images.work_ahead(PIECE_S))
        begin = time.perf_counter()
        self._beat()
        message = self._inbox.receive(meanwhile=self._beat)
        return message, time.perf_counter() - begin

    def _send_loaded(self, loaded: list[ImageLoaded]) -> None:
        for one in loaded:
            self._outbox.send(one)

    def _beat(self) -> None:
        """Give a sign of life, unless a grammar takes too long to load; and report the experts'
        tokens at times."""
        self._heartbeat.promise_work(self._step_timeout_s, self._runner.seconds_loading())
        if self._counts_experts and time.monotonic() >= self._next_report_s:
            self._next_report_s = time.monotonic() + EXPERTS_EVERY_S
            tokens = self._runner.expert_tokens()
            if tokens is not None and tokens != self._reported:
                self._reported = tokens
                self._outbox.send(tokens)

    def _answer(self, results: list[StepResult]) -> None:
        if self._answers:
            for result in results:
                self._outbox.send(result)


def pick_device(name: str, rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda was given, but torch finds no CUDA device; use --device cpu."
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank)


def replica_share(config: ServerConfig, device: torch.device) -> ServerConfig:
    """The settings of one replica. On a CPU, replicas share its time and the memory of the machine;
    each has GPUs of its own.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if config.dp == 1:
        return config
    if device.type == "cuda":
        if config.dp * config.tp > torch.cuda.device_count():
            raise ConfigError(
                f"--dp {config.dp} with --tp {config.tp} needs {config.dp * config.tp} GPUs and torch finds "
                f"{torch.cuda.device_count()}."
            )
        return config
    take_replica_share(config.dp)
    return dataclasses.replace(config, mem_fraction_static=config.mem_fraction_static / config.dp)


def join_ranks(
    folder: Path, rank: int, size: int, device: torch.device, expert_groups: int = 1
) -> TensorParallel:
    """Meet the other ranks, over NCCL between GPUs and gloo between CPU processes.

    Every rank gets every plan and computes the same tokens from the same logits; rank 0 answers.
    """
    if size == 1:
        return TensorParallel()
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {size} needs {size} GPUs and torch finds {torch.cuda.device_count()}."
        )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/ranks",
        rank=rank,
        world_size=size,
    )
    on_host = dist.new_group(backend="gloo") if device.type == "cuda" else None
    return TensorParallel(rank, size, host_group=on_host, expert_groups=expert_groups)


def run_worker(
    config: ServerConfig,
    channels: Channels,
    arguments: argparse.Namespace,
    supervisor: SupervisorLink,
) -> None:
    """Entry point of ``python -m radixrt.worker``."""
    process = WorkerProcess(config, channels, arguments.rank, arguments.kept_fd)
    give_memory_back()  # what loading has left
    keep_freed_memory()  # weights and KV pool are allocated; later allocations recur in every step
    gc.freeze()
    process.run()
