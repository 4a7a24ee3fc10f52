"""Builds a model runner: loads the weights, chooses the number of threads, tries the largest step,
and gives the remaining memory to the KV pool."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace

from radixrt.attention.backend import AttentionSetup
from radixrt.attention.cpu import CpuBackend
from radixrt.attention.kv_spec import kv_dtype
from radixrt.attention.registry import make_backend, resolve_backend
from radixrt.base.config import MAX_RUNNING_REQUESTS, MIN_RUNNING_REQUESTS, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.device.device import Device
from radixrt.layers.kernels.choice import layer_kernels
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.mlp import count_tokens
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import weight_bytes
from radixrt.messages.adapters import AdapterRead
from radixrt.messages.answers import EngineInfo
from radixrt.messages.grammars import GrammarLoaded
from radixrt.messages.images import VisionInfo
from radixrt.models.checkpoint import (
    generation_config,
    read_config,
    served_context_length,
    unreadable,
)
from radixrt.models.decoder import CausalLM
from radixrt.models.images import why_no_images
from radixrt.models.loader import load_model
from radixrt.models.pooling import read_pooling, read_score_tokens
from radixrt.worker.adapters import AdapterLoader, load_at_start, make_adapters
from radixrt.worker.drafts.head_choice import load_draft_head, speculation_of
from radixrt.worker.drafts.head_pages import head_specs
from radixrt.worker.fingerprint import begin_weights_digest, kv_parts, machine_parts, stats_of_files
from radixrt.worker.images import ImageFeatures, vision_info
from radixrt.worker.kv.pool import (
    KVPool,
    bytes_per_token,
    kept_states,
    pool_pages,
    pool_tokens,
    shared_bytes,
    state_rows,
)
from radixrt.worker.kv.shared_memory import SharedMemory, wants_shared_memory
from radixrt.worker.kv.states import SlotStates, shared_state_bytes, state_bytes
from radixrt.worker.pooling import EncoderRunner, Pooler
from radixrt.worker.runner import ModelRunner
from radixrt.worker.runner_parts import RunnerParts
from radixrt.worker.sampling.grammar_loader import GrammarLoader
from radixrt.worker.threads import use_fitting_threads
from radixrt.worker.trial_run import try_largest_prompts, try_largest_step

log = logging.getLogger(__name__)

TOKENS_PER_REQUEST = 1024
"""Tokens of the KV pool for each sequence that may run, unless the user sets their number."""


@dataclass(frozen=True)
class _Loaded:
    """A model in memory, and the facts about it."""

    model: Any
    info: EngineInfo
    """Without those of the KV pool."""
    pooler: Pooler | None
    """The pooler of a checkpoint that gives numbers."""
    expert_counts: torch.Tensor | None = None
    """See ``RunnerParts``."""


def build_runner(
    config: ServerConfig,
    device: Device,
    tp: TensorParallel,
    tokenizer_file: Path,
    report: Callable[[GrammarLoaded | AdapterRead], None],
    kept_adapters: Path | None = None,
    kept_fd: int = -1,
) -> tuple[ModelRunner, EngineInfo]:
    """Load a decoder and lay out its memory.

    Args:
        tokenizer_file: a tokenizer.json, read when the first grammar is loaded.
        report: called with every grammar and adapter that is ready, from other threads.
        kept_adapters: see :func:`load_at_start`.
        kept_fd: memory of the supervisor for the KV pool; below 0: there is none.

    Raises:
        ConfigError: the checkpoint is broken, or the memory does not hold weights, largest step and
            KV pool.
    """
    _check_and_say(config, device)
    kernels = layer_kernels(device.torch_device)
    names_kv = config.cache_dir is not None or config.receipts
    weights = begin_weights_digest(config) if names_kv and tp.rank == 0 else None
    loaded = _load_with_facts(config, device, tp, kernels)
    model, info = loaded.model, loaded.info
    adapters = make_adapters(config, model, kernels)
    if adapters is not None:
        info = replace(info, adapters=load_at_start(config, adapters, kept_adapters))
    longest = info.context_length
    one_state = state_bytes(model.state_specs())
    head = load_draft_head(config, model, info, kernels)
    info = replace(info, speculation=speculation_of(config, info.device, head))
    setup = _attention_setup(config, model, device, longest)
    if config.cache_dir is not None and not bytes_per_token(setup):
        raise ConfigError(f"--cache-dir: {info.architecture} keeps no KV; leave it out.")
    if head is not None:
        info = replace(info, weight_bytes=info.weight_bytes + weight_bytes(head))
        specs = head_specs(head, config.page_size, setup.kv_dtype)
        setup = dataclasses.replace(setup, head_specs=specs)
    backend_name = resolve_backend(config.attention_backend, setup)
    shared = None
    if kept_fd >= 0 and may_share_pool(config, device):
        live = kv_parts(config, model, setup, backend_name, stats_of_files(config), {})
        shared = SharedMemory(kept_fd, live, tp)
    kept_pages, kept_slots = (0, 0) if shared is None else (shared.num_pages, shared.num_slots)
    if kept_slots:
        setup = dataclasses.replace(setup, max_rows=kept_slots)
    else:
        setup = _with_rows(setup, config, tp, one_state)
    loader = GrammarLoader(tokenizer_file, model.vocab_size, info.eos_token_ids, report)
    backend = make_backend(backend_name, setup)
    taped = kernels.is_taped and isinstance(backend, CpuBackend) and tp.size == 1
    parts = RunnerParts(
        config,
        model,
        setup,
        backend,
        backend_name,
        info.eos_token_ids,
        loader,
        taped,
        tp,
        loaded.pooler,
        loaded.expert_counts,
        head,
    )
    parts.reserve_for_graphs()
    if is_gpu(device):
        try_largest_step(parts, longest)
    pages = kept_pages or _pool_pages(config, setup, tp, longest, one_state)
    num_kept = kept_states(setup, pages, one_state) if one_state else 0
    state_specs = model.state_specs() if one_state else []
    if shared is not None:
        of_states = shared_state_bytes(state_specs, setup.max_rows, num_kept)
        shared.begin(pages, setup.max_rows, shared_bytes(setup, pages) + of_states)
    pool = KVPool(setup, pages, shared=shared)
    adapter_loader = None if adapters is None else AdapterLoader(adapters, report)
    states = SlotStates(state_specs, setup.max_rows, num_kept, shared) if one_state else None
    images = None
    if info.vision is not None and (reason := _why_no_images_here(info.vision, setup)):
        info = replace(info, vision=None, why_no_images=reason)
    if info.vision is not None:
        longest_s = (config.max_step_ms or math.inf) / 1e3
        images = ImageFeatures(model, longest_s, config.idle_share)
    graphs = parts.decode_graphs(pool)
    return ModelRunner(parts, pool, graphs, states, adapter_loader, images), replace(
        info,
        kept_states=num_kept,
        state_bytes=one_state * tp.size,
        kv_pool_tokens=pages * config.page_size,
        max_running_requests=setup.max_rows,
        kv_bytes_per_token=bytes_per_token(setup) * tp.size,
        kv_parts={}
        if weights is None
        else kv_parts(config, model, setup, backend_name, weights.result(), machine_parts()),
        pool_id="" if shared is None else shared.pool_id,
        attention_backend=backend_name,
    )


def may_share_pool(config: ServerConfig, device: Device) -> bool:
    """Whether the KV pool outlives this worker.

    Raises:
        ConfigError: the user asks for it, and it cannot.
    """
    if config.shared_kv_pool == "off":
        return False
    if is_gpu(device):
        if config.shared_kv_pool == "on":
            raise ConfigError("--shared-kv-pool on: not yet on a GPU; leave it out.")
        return False
    if not wants_shared_memory(config):
        log.info(
            "KV does not outlive a worker, since shared memory has no pages of 2 MiB (see `radixrt doctor`)."
        )
        return False
    return True


def _count_tokens(model: Any, device: Device) -> torch.Tensor:
    """
    Raises:
        ConfigError: the model or the device has no counts.
    """
    if is_gpu(device):
        raise ConfigError("--expert-metrics counts on a CPU alone; leave it out.")
    counts = count_tokens(model)
    if not len(counts):
        raise ConfigError("--expert-metrics: this model has no experts; leave it out.")
    return counts


def _why_no_images_here(vision: VisionInfo, setup: AttentionSetup) -> str | None:
    """A sentence that says why a model with a tower is served without images under these settings;
    None: it sees them."""
    if vision.whole_images and setup.kv_dtype == torch.int8:
        return "Not yet: images for this model with --kv-cache-dtype int8; text is served."
    return None


def build_encoder(config: ServerConfig, device: Device) -> tuple[EncoderRunner, EngineInfo]:
    """Load an encoder.

    Raises:
        ConfigError: the checkpoint is broken, or does not fit into the memory.
    """
    if config.cache_dir is not None:
        raise ConfigError("--cache-dir: encoders keep no KV; leave it out.")
    if config.receipts:
        raise ConfigError("--receipts: encoders generate nothing; leave it out.")
    if config.num_adapter_places:
        raise ConfigError("LoRA adapters of an encoder are not served yet: leave --lora out.")
    kernels = layer_kernels(device.torch_device)
    loaded = _load_with_facts(config, device, TensorParallel(), kernels)
    info = loaded.info
    assert loaded.pooler is not None and info.pooling is not None, "an encoder gives numbers"
    rows = config.max_running_requests or MIN_RUNNING_REQUESTS
    pages = rows * math.ceil(info.context_length / config.page_size)
    runner = EncoderRunner(loaded.model, loaded.pooler, device)
    if is_gpu(device):
        try_largest_prompts(runner, config, info.context_length)
    return runner, replace(
        info,
        max_running_requests=rows,
        kv_pool_tokens=pages * config.page_size,  # the scheduler counts them; they take no memory
        attention_backend="bidirectional",
        pooling=replace(info.pooling, whole_prompts=True),
    )


def _load_with_facts(
    config: ServerConfig, device: Device, tp: TensorParallel, kernels: LayerKernels
) -> _Loaded:
    model_dir = Path(config.model_path)
    hf_config = read_config(model_dir)
    pooling = read_pooling(model_dir, hf_config)
    model = _load(config, device, tp, kernels)
    usual = None if pooling is None else pooling.usual_length
    num_bytes = weight_bytes(model) * tp.size
    use_fitting_threads(config.kernel_threads, num_bytes)
    defaults = generation_config(model_dir)
    eos_token_ids = _known_tokens(defaults.pop("eos_token_ids"), model.vocab_size)
    pooler = None
    if pooling is not None:
        size = model.config.hidden_size
        pooler = Pooler(pooling, model.classify, size, device.torch_device)
    score_tokens = read_score_tokens(model_dir)
    if any(token >= model.vocab_size for token in score_tokens):
        raise ConfigError(
            f"The checkpoint judges by the tokens {list(score_tokens)}, which its vocabulary of {model.vocab_size} lacks."
        )
    info = EngineInfo(
        context_length=served_context_length(hf_config, config.context_length, usual),
        vocab_size=model.vocab_size,
        kv_pool_tokens=0,
        page_size=config.page_size,
        kv_bytes_per_token=0,
        num_parameters=model.num_parameters,
        weight_bytes=num_bytes,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device.torch_device),
        attention_backend="",
        architecture=hf_config["architectures"][0],
        default_sampling=defaults,
        eos_token_ids=eos_token_ids,
        pooling=None if pooler is None else pooler.info,
        score_tokens=score_tokens,
        vision=vision_info(model),
        why_no_images=why_no_images(model_dir, hf_config, device.torch_device.type) or "",
    )
    counts = _count_tokens(model, device) if config.expert_metrics else None
    return _Loaded(model, info, pooler, counts)


def _check_and_say(config: ServerConfig, device: Device) -> None:
    """Refuse settings that this device does not serve before the weights are loaded, and warn of a
    default that has no effect here.

    Raises:
        ConfigError: the KV cache would be in int8 on a GPU.
    """
    if not is_gpu(device):
        return
    if config.cache_dir is not None:
        raise ConfigError("--cache-dir: not yet on a GPU; leave it out, or use --device cpu.")
    if config.receipts:
        raise ConfigError("--receipts: on a GPU bits depend on the batch; leave it out.")
    if config.draft_model is not None:
        raise ConfigError("--draft-model: not yet on a GPU; leave it out, or use --device cpu.")
    if config.kv_cache_dtype == "int8":
        raise ConfigError("--kv-cache-dtype int8 is for CPUs; on a GPU choose fp8_e4m3 or auto.")
    if config.speculation != "off":
        log.warning("Speculation is off: drafts are verified on a CPU only.")


def is_gpu(device: Device) -> bool:
    """Whether it has memory of its own, of which the KV pool gets the rest."""
    return device.torch_device.type == "cuda"


def _load(config: ServerConfig, device: Device, tp: TensorParallel, kernels: LayerKernels) -> Any:
    begin = time.perf_counter()
    try:
        model = load_model(
            Path(config.model_path),
            load_format=config.load_format,
            dtype=config.dtype,
            quantization=config.quantization,
            device=device.torch_device,
            tp=tp,
            seed=config.random_seed,
            context_length=config.context_length,
            trust_remote_code=config.trust_remote_code,
            kernels=kernels,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The model's weights do not fit into the memory of {device.torch_device}: spread them over more GPUs with "
            f"--tp, or free memory. ({error})"
        ) from error
    except ConfigError:
        raise
    except Exception as error:
        raise unreadable(Path(config.model_path), error) from error
    log.info("Loaded %s in %.1f s.", type(model).__name__, time.perf_counter() - begin)
    return model


def _attention_setup(
    config: ServerConfig, model: CausalLM, device: Device, longest: int
) -> AttentionSetup:
    cached = kv_dtype(config.kv_cache_dtype, model.dtype)
    fixed = config.deterministic and is_gpu(device)
    return AttentionSetup(
        specs=model.attention_specs(),
        kv_specs=model.kv_specs(cached),
        dtype=model.dtype,
        kv_dtype=cached,
        page_size=config.page_size,
        max_rows=config.max_running_requests or MIN_RUNNING_REQUESTS,
        max_pages=math.ceil(longest / config.page_size),
        device=device,
        cascade=not (config.debug_disable_cascade or fixed),
        prefill_kernel="fa2" if fixed else config.prefill_kernel,
        deterministic=fixed,
    )


def _pool_pages(
    config: ServerConfig, setup: AttentionSetup, tp: TensorParallel, longest: int, one_state: int
) -> int:
    """Pages of the KV pool, the same on every rank."""
    pages = pool_pages(
        setup,
        mem_fraction=config.mem_fraction_static,
        max_total_tokens=config.max_total_tokens,
        max_useful_tokens=2 * setup.max_rows * longest,
        one_state=one_state,
    )
    return _smallest(pages, setup.device, tp)


def _with_rows(
    setup: AttentionSetup, config: ServerConfig, tp: TensorParallel, one_state: int
) -> AttentionSetup:
    """The setup with as many rows as the pool of a GPU gives, or as the memory gives states of
    recurrent layers, where the user asks for no number."""
    if config.max_running_requests is not None:
        return setup
    if one_state:
        rows = min(setup.max_rows, state_rows(setup, config.mem_fraction_static, one_state))
        return dataclasses.replace(setup, max_rows=_smallest(rows, setup.device, tp))
    if not is_gpu(setup.device):
        return setup
    tokens = pool_tokens(setup, config.mem_fraction_static)
    if config.max_total_tokens is not None:
        tokens = min(tokens, config.max_total_tokens)
    rows = _smallest(running_requests(tokens), setup.device, tp)
    log.info("At most %d requests run at a time (--max-running-requests).", rows)
    return dataclasses.replace(setup, max_rows=rows)


def running_requests(pool_tokens: int) -> int:
    """The number of sequences that run at a time on a GPU whose KV pool has this size."""
    rows = pool_tokens // TOKENS_PER_REQUEST // 64 * 64
    return min(max(rows, MIN_RUNNING_REQUESTS), MAX_RUNNING_REQUESTS)


def _smallest(count: int, device: Device, tp: TensorParallel) -> int:
    """The smallest of the ranks' numbers."""
    if tp.size == 1:
        return count
    smallest = torch.tensor(count, device=device.torch_device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


def _known_tokens(token_ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """End tokens that the model can produce; some checkpoints name others too."""
    unknown = [token for token in token_ids if not 0 <= token < vocab_size]
    if unknown:
        log.warning("Ignored end tokens %s: the vocabulary has %d tokens.", unknown, vocab_size)
    return tuple(token for token in token_ids if token not in unknown)
