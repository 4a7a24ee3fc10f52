"""The worker process: load the model, make the KV pool, execute step plans in order."""

import argparse
import gc
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import radixrt_kernels
from radixrt.attention.registry import make_backend, resolve_backend
from radixrt.config import ServerConfig
from radixrt.errors import ConfigError
from radixrt.ipc import Channels, Inbox, Outbox
from radixrt.layers.kernels import LayerKernels
from radixrt.layers.native_kernels import NativeKernels
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.torch_kernels import TorchKernels
from radixrt.layers.weights import weight_bytes
from radixrt.messages import EngineInfo, GrammarLoaded, StepPlan, ToWorker
from radixrt.models.checkpoint import generation_config, read_config, served_context_length
from radixrt.models.loader import load_model
from radixrt.worker.batch import PersistentBatch
from radixrt.worker.grammars import GrammarShop, GrammarState
from radixrt.worker.kv_pool import KVPool, bytes_per_token, pool_pages
from radixrt.worker.runner import ModelRunner
from radixrt.worker.sampling_state import SamplingState

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 64 << 20


class WorkerProcess:
    """One rank: a model runner between two channels."""

    def __init__(self, config: ServerConfig, channels: Channels, rank: int) -> None:
        self._inbox: Inbox[ToWorker] = Inbox(
            channels.address("scheduler", f"worker{rank}"), ToWorker
        )
        self._outbox = Outbox(channels.address("worker", "scheduler"))
        self._answers = rank == 0
        device = pick_device(config.device, rank)
        tp = join_ranks(channels.run_dir, rank, config.tp, device)
        from_threads = Outbox(channels.address("worker", "scheduler"))
        self._runner, info = build_runner(
            config, device, tp, channels.tokenizer_file, from_threads.send
        )
        if self._answers:
            self._outbox.send(info)

    def run(self) -> None:
        """Forever."""
        while True:
            begin = time.perf_counter()
            message = self._inbox.receive()
            if not isinstance(message, StepPlan):
                self._runner.grammars.shop.order(message)
                continue
            result = self._runner.step(message, time.perf_counter() - begin)
            if self._answers:
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


def join_ranks(run_dir: Path, rank: int, size: int, device: torch.device) -> TensorParallel:
    """Meet the other ranks, over NCCL between GPUs and gloo between CPU processes.

    Every rank gets every plan and computes the same tokens from the same logits; rank 0 answers.
    """
    if size == 1:
        return TensorParallel()
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {size} needs {size} GPUs and torch finds {torch.cuda.device_count()}."
        )
    if device.type == "cpu":
        use_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{run_dir}/ranks",
        rank=rank,
        world_size=size,
    )
    return TensorParallel(rank, size)


def build_runner(
    config: ServerConfig,
    device: torch.device,
    tp: TensorParallel,
    tokenizer_file: Path,
    report_grammar: Callable[[GrammarLoaded], None],
) -> tuple[ModelRunner, EngineInfo]:
    """Load the model and lay out its memory.

    Args:
        config: of the server.
        device: of this rank.
        tp: this rank among the others.
        tokenizer_file: a tokenizer.json, read when the first grammar is loaded.
        report_grammar: told of every grammar that is ready, from other threads.

    Raises:
        ConfigError: the checkpoint is broken, or the memory does not hold the KV pool.
    """
    model_dir = Path(config.model_path)
    begin = time.perf_counter()
    model = load_model(
        model_dir,
        load_format=config.load_format,
        dtype=config.dtype,
        quantization=config.quantization,
        device=device,
        tp=tp,
        seed=config.random_seed,
        context_length=config.context_length,
        trust_remote_code=config.trust_remote_code,
        kernels=layer_kernels(device),
    )
    log.info("Loaded %s in %.1f s.", type(model).__name__, time.perf_counter() - begin)
    hf_config = read_config(model_dir)
    longest = served_context_length(hf_config, config.context_length)
    specs, dtype = model.attention_specs(), model.dtype
    num_bytes = weight_bytes(model) * tp.size
    use_fitting_threads(num_bytes)
    token_bytes = bytes_per_token(specs, dtype)
    num_pages = pool_pages(
        token_bytes,
        config.page_size,
        device,
        mem_fraction=config.mem_fraction_static,
        max_total_tokens=config.max_total_tokens,
        max_useful_tokens=2 * config.max_running_requests * longest,
    )
    if tp.size > 1:  # every rank gets the same page ids
        smallest = torch.tensor(num_pages, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        num_pages = int(smallest)
    max_pages = math.ceil(longest / config.page_size)
    defaults = generation_config(model_dir)
    eos_token_ids = _known_tokens(defaults.pop("eos_token_ids"), model.vocab_size)
    backend = resolve_backend(config.attention_backend, device)
    runner = ModelRunner(
        model,
        make_backend(backend, device),
        KVPool(specs, num_pages, config.page_size, dtype, device),
        PersistentBatch(config.max_running_requests, max_pages, config.page_size, device),
        SamplingState(
            config.max_running_requests,
            model.vocab_size,
            eos_token_ids=eos_token_ids,
            device=device,
        ),
        GrammarState(
            GrammarShop(tokenizer_file, model.vocab_size, eos_token_ids, report_grammar),
            model.vocab_size,
            eos_token_ids=eos_token_ids,
            jump_forward=not config.disable_jump_forward,
        ),
    )
    return runner, EngineInfo(
        context_length=longest,
        vocab_size=model.vocab_size,
        kv_pool_tokens=num_pages * config.page_size,
        page_size=config.page_size,
        kv_bytes_per_token=token_bytes * tp.size,
        num_parameters=model.num_parameters,
        weight_bytes=num_bytes,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=backend,
        architecture=hf_config["architectures"][0],
        default_sampling=defaults,
        eos_token_ids=eos_token_ids,
    )


def layer_kernels(device: torch.device) -> LayerKernels:
    """The fastest kernels that this installation has for a device."""
    if device.type != "cpu":
        return TorchKernels()
    if radixrt_kernels.available():
        return NativeKernels()
    log.warning(
        "The native CPU kernels are not used and PyTorch computes, at a fraction of the speed: %s.",
        radixrt_kernels.missing_because,
    )
    return TorchKernels()


def _known_tokens(token_ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """End tokens that the model can produce; some checkpoints name others too."""
    unknown = [token for token in token_ids if not 0 <= token < vocab_size]
    if unknown:
        log.warning("Ignored end tokens %s: the vocabulary has %d tokens.", unknown, vocab_size)
    return tuple(token for token in token_ids if token not in unknown)


def use_fitting_threads(num_bytes: int) -> None:
    """Compute small models with one thread: waking others costs more than they save, and the other
    processes need cores too. The built-in model on two quiet cores, against two threads: one stream 1.4
    times as fast, 16 short streams 1.07, 16 streams of 550 tokens 0.83; on busy cores up to 3.6 times."""
    if num_bytes < SMALL_MODEL_BYTES:
        use_threads(1)


def use_threads(count: int) -> None:
    """Let PyTorch and the native kernels compute with ``count`` threads."""
    torch.set_num_threads(count)
    if radixrt_kernels.native is not None:
        radixrt_kernels.native.set_num_threads(count)


def run_worker(config: ServerConfig, channels: Channels, arguments: argparse.Namespace) -> None:
    """Entry point of ``python -m radixrt.worker``."""
    process = WorkerProcess(config, channels, arguments.rank)
    gc.freeze()
    process.run()
