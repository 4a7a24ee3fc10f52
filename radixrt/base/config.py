"""Declares every setting of a server once: the flags, the settings file, ``LLM``, the checks and
docs/server.md follow from the declaration."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from radixrt.base.errors import ConfigError
from radixrt.base.settings.adapters import named_adapters
from radixrt.base.settings.replicas import ReplicaSettings
from radixrt.base.settings.scheduling import SchedulerSettings
from radixrt.base.settings.setting import (
    METRICS_PEER,
    ORIGIN,
    REASONING_ALIASES,
    SECTIONS,
    TOOL_CALL_ALIASES,
    ZMQ_ADDRESS,
    AttentionBackendName,
    GrammarBackendName,
    ReasoningParserName,
    ToolCallParserName,
    WhitespaceName,
    section,
    settings_of,
)

DEMO_MODEL = "demo"
"""The value of ``--model-path`` that stands for the model inside the package."""

MIN_ADAPTER_PLACES = 8
"""Adapters that may be loaded where some are given and no number is."""

MIN_STEP_TIMEOUT_S = 2.0

MIN_RUNNING_REQUESTS, MAX_RUNNING_REQUESTS = 256, 1024
"""Bounds of ``max_running_requests`` if it is not given; the lower one is its value on a CPU."""

(_model, _models, _http, _device, _, _memory, _,
 _scheduling, _kv_events, _structured, _debug) = map(section, SECTIONS)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerConfig(SchedulerSettings, ReplicaSettings):
    """Settings of one engine and its server. Field ``max_total_tokens`` is flag
    ``--max-total-tokens``."""

    model_path: str = _model(
        DEMO_MODEL,
        "Folder of a Hugging Face checkpoint, a hub id, a GGUF file, or hf:USER/REPO:Q4_K_M; the "
        "default is the built-in model. Several times, or a folder: docs/guides/models.md.",
        metavar="DIR_OR_HUB_ID",
    )
    tokenizer_path: str | None = _model(
        None, "Folder or hub id of the tokenizer, if it is not in the checkpoint's folder."
    )
    mmproj: str | None = _model(
        None, "Vision tower of a GGUF model, if not beside it.", metavar="FILE"
    )
    served_model_name: str | None = _model(
        None,
        "Names of the model in the API; by default the last part of the model path.",
        metavar="NAME",
        several=True,
    )
    load_format: Literal["auto", "safetensors", "dummy"] = _model(
        "auto",
        "auto and safetensors read the checkpoint's weights; dummy fills them with random numbers.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model(
        "auto", "Type of weights and activations; auto is the checkpoint's own."
    )
    quantization: Literal["auto", "int8", "int4", "fp8", "plain"] = _model(
        "auto",
        "Weight format of the linear layers: auto keeps the checkpoint's, but makes fp8 blocks int8; "
        "int8, int4 and fp8 round plain weights or fp8 blocks; plain decodes fp8 blocks and GGUF.",
    )
    context_length: int | None = _model(
        None,
        "Longest prompt plus answer, in tokens; at most (and by default) the checkpoint's.",
        within=(1, None),
    )
    draft_model: str | None = _model(
        None,
        "EAGLE-3 head that drafts tokens (docs/speculation.md); by default the checkpoint's folder "
        "eagle3.",
        metavar="DIR_OR_HUB_ID",
    )
    lora: str | None = _model(
        None,
        "LoRA adapters: names for requests, and peft's folders or GGUF files.",
        metavar="NAME=PATH",
        several=True,
    )
    max_loras: int | None = _model(
        None,
        "Most adapters that are loaded at a time; by default those of --lora, and at least 8.",
        within=(1, 256),
    )
    max_lora_rank: int = _model(64, "Largest rank of an adapter.", within=(1, 512))
    max_images: int = _model(64, "Most images of a request.", within=(1, 1024))
    max_image_pixels: int = _model(1 << 24, "Most pixels of an image.", within=(1, 1 << 28))
    allow_image_hosts: str | None = _model(
        None, "Hosts of images that are fetched; default: none.", metavar="HOST", several=True
    )
    max_image_mib: int = _model(20, "Most MiB of an image's file.", within=(1, 20))
    chat_template: str | None = _model(
        None, "File with a Jinja chat template that replaces the tokenizer's own.", metavar="FILE"
    )
    trust_remote_code: bool = _model(
        False,
        "Let transformers run Python code that comes with the checkpoint; it can do anything that "
        "you can do.",
    )
    random_seed: int = _model(
        0, "Seed of dummy weights and of requests without a seed.", within=(0, None)
    )

    keep_alive: float | None = _models(
        None,
        "Seconds after its last request at which a model is unloaded; by default when another "
        "needs its memory.",
        within=(0, None),
    )
    max_loaded_models: int | None = _models(
        None, "Most models that are loaded at a time.", within=(1, None)
    )
    model_memory_mb: int | None = _models(
        None,
        "Memory in MiB for all loaded models; by default what is available at the start.",
        within=(1, None),
    )

    host: str = _http("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = _http(30000, "TCP port to listen on; 0 picks a free one.", within=(0, 65535))
    api_keys: str | None = _http(
        None,
        "JSON or TOML file with the API keys, their roles and limits (docs/security.md); SIGHUP "
        "reads it again. Also RADIXRT_API_KEYS.",
        metavar="FILE",
    )
    api_key: str | None = _http(
        None,
        "One API key, an admin's. Other users of the machine can see it; the environment variable "
        "RADIXRT_API_KEY hides it.",
    )
    allowed_hosts: str | None = _http(
        None,
        "Further host names of the server, separated by commas; * is all. IP addresses, localhost "
        "and the machine's own name always pass.",
        metavar="NAME,...",
    )
    cors_origins: str | None = _http(
        None,
        "Origins of web pages that may use the server, such as https://chat.example.com, separated by commas; * is all.",
        metavar="ORIGIN,...",
        form=ORIGIN,
    )
    tls_cert: str | None = _http(
        None,
        "PEM file of a certificate and of its issuers; the server then speaks HTTPS only.",
        metavar="FILE",
    )
    tls_key: str | None = _http(
        None,
        "PEM file of the certificate's private key, if it is not in the same file.",
        metavar="FILE",
    )
    metrics_compat: str | None = _http(
        None,
        "Repeat /metrics under the names of vllm, sglang, or both, separated by commas.",
        metavar="NAME,...",
        form=METRICS_PEER,
    )
    otlp_endpoint: str | None = _http(
        None,
        "Address of an OpenTelemetry collector (OTLP over HTTP) for traces, such as "
        "http://127.0.0.1:4318.",
        metavar="URL",
    )
    hide_cache_texts: bool = _http(
        False, "Show no text of prompts in /v1/cache/tree and in explanations of cache misses."
    )
    kept_conversations_mb: int = _http(
        256, "Memory in MiB for kept conversations (field keep); 0 keeps none.", within=(0, None)
    )
    max_timeout: float = _http(
        3600.0, "Largest timeout that a request may set, in seconds.", within=(1, None)
    )
    receipts: bool = _http(
        False, "On a CPU: let requests ask for receipts (docs/guides/receipts.md)."
    )
    step_timeout: float | None = _http(
        None,
        "Seconds after which a process that hangs is killed and replaced (a worker: at least 20 "
        "times its longest step); 0 is never; by default 30, and 3 for a stopped process.",
        within=(0, None),
    )
    shutdown_grace: float = _http(
        30.0, "Seconds in which running answers may finish after SIGTERM.", within=(0, None)
    )
    log_level: Literal["debug", "info", "warning", "error"] = _http("info", "Minimum log level.")

    device: Literal["auto", "cpu", "cuda"] = _device(
        "auto", "Where the model runs; auto is a GPU if there is one."
    )
    tp: int = _device(1, "Tensor-parallel ranks, one worker process each.", within=(1, None))
    ep: int = _device(
        1,
        "Groups of --tp ranks over which whole experts of a mixture are spread "
        "(docs/guides/tuning.md); 0: as many as --tp.",
        within=(0, None),
    )
    expert_metrics: bool = _device(
        False, "On a CPU: count the tokens of each expert, for /metrics."
    )
    attention_backend: AttentionBackendName = _device(
        "auto", "Kernels that compute attention; auto is the fastest that runs on the device."
    )
    prefill_kernel: Literal["auto", "fa2", "fa3"] = _device(
        "auto",
        "FlashInfer kernel for prompts; auto is fa3 for long prompts on Hopper if it works, else "
        "fa2.",
    )
    deterministic: bool = _device(
        False,
        "On a GPU: attention that does not depend on the batch, at less speed "
        "(docs/determinism.md). On a CPU answers never depend on it.",
    )
    kernel_threads: int | None = _device(
        None,
        "Threads that compute on a CPU, in each rank; by default one per core, and one for small "
        "models.",
        within=(1, None),
    )
    numa: bool = _device(
        False,
        "Bind each rank of --tp and each replica of --dp to the processors and the memory of a NUMA "
        "node, or of its part of one.",
    )
    cuda_graph_max_batch_size: int | None = _device(
        None,
        "Largest decode step that is captured as a CUDA graph, in sequences; by default "
        "--max-running-requests, at most 1,024.",
        within=(1, 4096),
    )
    mem_fraction_static: float = _memory(
        0.85,
        "Share of the GPU's memory for weights, the largest step and the KV pool; on a CPU, share "
        "of half of the available memory (up to 8 GiB) for the KV pool.",
        within=(0.05, 0.98),
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "int8"] = _memory(
        "auto",
        "Type of the KV cache: auto is the activations' own; fp8_e4m3 (GPUs) and int8 (CPUs) hold "
        "twice the tokens of bfloat16, at less precision.",
    )
    max_total_tokens: int | None = _memory(
        None,
        "Size of the KV pool in tokens; by default computed from the memory.",
        within=(1, None),
    )
    page_size: int = _memory(
        16, "Tokens in a page of KV cache; prefixes are shared in whole pages.", within=(1, 1024)
    )

    max_prefill_tokens: int | None = _scheduling(
        None,
        "Maximum number of prompt tokens in one step, over all sequences; by default 8192 on a GPU "
        "and 512 on a CPU.",
        within=(1, None),
    )
    request_log: str | None = _scheduling(
        None,
        "File for one line per request (times, lengths, hashes of prefixes, no text), for radixrt "
        "bench cache.",
        metavar="FILE",
    )

    kv_events: str | None = _kv_events(
        None,
        "ZeroMQ address for events of blocks that enter and leave the KV cache, such as "
        "tcp://127.0.0.1:5557; all who can connect can read them.",
        metavar="ADDRESS",
        form=ZMQ_ADDRESS,
    )
    kv_events_replay: str | None = _kv_events(
        None,
        "ZeroMQ address that answers subscribers which have missed events.",
        metavar="ADDRESS",
        form=ZMQ_ADDRESS,
    )
    kv_events_format: Literal["radixrt", "vllm"] = _kv_events(
        "radixrt",
        "Wire format of events and replays: radixrt's (docs/internals/kv_events.md) or vLLM's, which needs "
        "--kv-events-tokens.",
    )
    kv_events_tokens: bool = _kv_events(
        False, "Publish the token ids of the blocks too: the prompts and answers of all users."
    )

    grammar_backend: GrammarBackendName = _structured(
        "auto",
        "Library that enforces structured output: llguidance, and with auto and fsm outlines-core "
        "for regular expressions and choices with small finite-state machines.",
        aliases={"outlines": "fsm"},
    )
    grammar_whitespace: WhitespaceName = _structured(
        "flexible",
        "White space in constrained JSON: flexible lets the model indent, compact allows none.",
    )
    grammar_compile_timeout: float = _structured(
        10.0,
        "Seconds after which a compilation is stopped and its request refused.",
        within=(0.1, 3600),
    )
    tool_call_parser: ToolCallParserName = _structured(
        "auto",
        "Format of the model's tool calls (docs/tools.md); auto recognises it by the chat "
        "template, none refuses requests with tools.",
        aliases=TOOL_CALL_ALIASES,
    )
    reasoning_parser: ReasoningParserName = _structured(
        "auto",
        "Format of the model's reasoning (docs/tools.md); auto recognises it by the chat template, "
        "none leaves it in the answer.",
        aliases=REASONING_ALIASES,
    )

    debug_disable_cascade: bool = _debug(
        False, "Read a prefix that sequences share once for each of them."
    )
    debug_disable_cuda_graph: bool = _debug(False, "Capture no decode steps as CUDA graphs.")
    debug_disable_overlap_schedule: bool = _debug(
        False, "Plan a step only when the result of the step before is back."
    )
    debug_disable_jump_forward: bool = _debug(
        False, "Sample also where the grammar allows only one token."
    )
    debug_reencode_answers: bool = _debug(
        False,
        "Encode a chat's earlier answers from their text, not as the tokens that the model generated.",
    )
    debug_validate_structured_output: bool = _debug(
        False, "Check every finished answer once more against its schema; log and count mismatches."
    )

    def prefill_budget(self, device: str) -> int:
        """Most prompt tokens of one step on ``device`` ("cpu", "cuda:0")."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        return 512 if device == "cpu" else 8192  # larger steps on a CPU are no faster

    def validate(self) -> "ServerConfig":
        """Return these settings, with choices in place of their aliases.

        Raises:
            ConfigError: a value is of the wrong type or out of its range, or settings exclude each
                other.
        """
        values = {name: setting.check(getattr(self, name)) for name, setting in SETTINGS.items()}
        for problem in self._problems():
            raise ConfigError(problem)
        return ServerConfig(**values)

    def _problems(self) -> Iterator[str]:
        """One sentence for each value, or pair of values, that the server can't start with."""
        pool = self.max_total_tokens
        if pool is not None and pool < self.page_size:
            page = f"one page of {self.page_size} tokens (--page-size)"
            yield f"--max-total-tokens {pool} is less than {page}."
        if self.api_key is not None and not self.api_key.strip():
            yield "--api-key is empty, so no client could send it; leave it out or set it."
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            yield f"--chat-template {self.chat_template}: there is no such file."
        if self.cache_bundle is not None and self.cache_dir is None:
            yield "--cache-bundle is added to a directory: give --cache-dir DIR, too."
        if self.draft_model is not None and self.speculation not in ("auto", "head"):
            yield f"--draft-model drafts nothing with --speculation {self.speculation}: leave one out."
        if self.cache_dir is not None and self.disable_radix_cache:
            yield "--cache-dir keeps nothing with --disable-radix-cache: leave one out."
        if self.receipts and self.is_linked:
            yield "--receipts names one engine: it does not go with --join or --replica-listen."
        if self.tls_key is not None and self.tls_cert is None:
            yield "--tls-key needs --tls-cert FILE."
        if 0 < (self.step_timeout or 0) < MIN_STEP_TIMEOUT_S:
            yield (
                f"--step-timeout {self.step_timeout:g} is too short, since an idle process gives a sign of "
                f"life once a second: set 0 or at least {MIN_STEP_TIMEOUT_S:g}."
            )
        if self.tp % self.expert_groups:
            yield (
                f"--ep {self.ep} must divide --tp {self.tp}: the ranks of --tp hold the experts. Set --tp to a "
                f"multiple of {self.ep}, or leave --ep out."
            )
        yield from self.replica_problems()
        if self.kv_events is None and (self.kv_events_replay or self.kv_events_tokens):
            yield "--kv-events-replay and --kv-events-tokens need --kv-events ADDRESS."
        if self.kv_events_format == "vllm" and not self.kv_events_tokens:
            yield (
                "--kv-events-format vllm needs --kv-events-tokens: readers of vLLM's events "
                "compute hashes of their own from the token ids."
            )
        tails = [(one or "").rpartition(":")[2] for one in (self.kv_events, self.kv_events_replay)]
        ports = [int(port) for port in tails if port.isdigit()]
        if self.dp > 1 and len(ports) == 2 and abs(ports[0] - ports[1]) < self.dp:
            yield (
                f"--kv-events and --kv-events-replay need ports that are at least {self.dp} apart with "
                f"--dp {self.dp}: each replica takes the next port."
            )
        adapters = named_adapters(self.lora)
        if self.num_adapter_places and self.is_linked:
            yield "--lora and --max-loras are not yet for engines that join: leave them out."
        if len(adapters) > self.num_adapter_places:
            yield f"--lora names {len(adapters)} adapters, and --max-loras is {self.max_loras}."
        for name in adapters.keys() & set(self.model_names):
            yield f"--lora: {name} is the name of the model; give the adapter another."
        if self.kv_events is not None and self.disable_radix_cache:
            yield "--kv-events publishes nothing with --disable-radix-cache: leave one out."

    @property
    def num_adapter_places(self) -> int:
        """Adapters that may be loaded at a time; 0: none are served."""
        given = len(named_adapters(self.lora))
        return self.max_loras or (max(given, MIN_ADAPTER_PLACES) if given else 0)

    @property
    def expert_groups(self) -> int:
        """Groups of ranks over which experts are spread."""
        return self.ep or self.tp

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        return self.model_names[0]

    @property
    def model_names(self) -> list[str]:
        """Its name in the API, and the other names that requests may use."""
        given = (self.served_model_name or "").replace(",", " ").split()
        return given or [self.model_path.rstrip("/").split("/")[-1]]

    def name_behind_base(self, name: str) -> str | None:
        """``NAME`` of ``MODEL:NAME``, for any name of this model; they may have colons themselves.

        >>> ServerConfig(model_path="hf:maker/X-GGUF:Q4_0").name_behind_base("X-GGUF:Q4_0:sql")
        'sql'
        """
        for base in self.model_names:
            if name.startswith(f"{base}:"):
                return name.removeprefix(f"{base}:")
        return None


SETTINGS = settings_of(ServerConfig)
"""Every setting, by name."""
