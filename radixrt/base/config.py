"""Every setting of a server, declared once: the checks, the command line and the page of the docs come from here."""

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from radixrt.base.errors import ConfigError

DEMO_MODEL = "demo"
"""The value of ``--model-path`` that stands for the model inside the package."""


def _section(name: str) -> Callable[..., Any]:
    """Makes the dataclass fields of one section of the docs: a default, its help text, and perhaps the range that it
    has to lie in (``at_least``, ``at_most``) and how help calls its value (``metavar``)."""

    def setting(default: Any, help: str, **details: Any) -> Any:
        return field(default=default, metadata={"section": name, "help": help, **details})

    return setting


_model = _section("Model")
_http = _section("HTTP server")
_device = _section("Device")
_memory = _section("Memory")
_scheduling = _section("Scheduling")
_kv_events = _section("KV events")
_structured = _section("Structured output")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one engine and its server. Field ``max_total_tokens`` is flag ``--max-total-tokens``."""

    model_path: str = _model(
        DEMO_MODEL,
        "Folder of a Hugging Face checkpoint, or a hub id to download. The default is the small demonstration "
        "model that comes with radixrt.",
        metavar="DIR_OR_HUB_ID",
    )
    tokenizer_path: str | None = _model(
        None, "Folder or hub id of the tokenizer, where it is not beside the weights."
    )
    served_model_name: str | None = _model(
        None, "Name of the model in the API; the last part of the model path if not given."
    )
    load_format: Literal["auto", "safetensors", "dummy"] = _model(
        "auto",
        "auto and safetensors read the checkpoint's safetensors files; dummy fills the weights with seeded random "
        "numbers (only config.json and a tokenizer are needed).",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model(
        "auto", "Type of weights and activations; auto: the checkpoint's own."
    )
    quantization: Literal["auto", "int8", "int4", "fp8"] = _model(
        "auto",
        "Form of the linear layers' weights. auto: as the checkpoint has them (plain, AWQ, GPTQ or fp8); int8, int4 and "
        "fp8 round a plain checkpoint while it is loaded. fp8 rounds activations too, and is fast on GPUs that multiply "
        "8-bit floats (Ada, Hopper and later).",
    )
    context_length: int | None = _model(
        None,
        "Longest prompt plus answer, in tokens; at most (and by default) what the checkpoint says.",
        at_least=1,
    )
    chat_template: str | None = _model(
        None, "File with a Jinja chat template that replaces the tokenizer's own.", metavar="FILE"
    )
    trust_remote_code: bool = _model(
        False,
        "Let transformers run Python code that comes with the tokenizer or config. Off, because such code can do "
        "anything that you can do; the models themselves never need it.",
    )
    reencode_answers: bool = _model(
        False,
        "Encode a chat's earlier answers anew from their text. If not given, those that this server gave are the tokens that "
        "the model generated, whose KV is in the cache, also where the tokenizer would write the text in other tokens.",
    )
    random_seed: int = _model(
        0, "Seed of dummy weights and of requests that bring none.", at_least=0
    )

    host: str = _http("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = _http(
        30000, "TCP port to listen on; 0 picks a free one.", at_least=0, at_most=65535
    )
    api_key: str | None = _http(
        None, "Clients must send this as a bearer token. /health, /ping and /metrics stay open."
    )
    hide_cache_texts: bool = _http(
        False,
        "Let /v1/cache/tree show sizes alone, and no text of prompts. (It never shows text of requests with a "
        "cache_salt.)",
    )
    max_body_bytes: int = _http(
        32 << 20, "A larger request body is refused with status 413.", at_least=1024
    )
    kept_conversations_mb: int = _http(
        256,
        "Memory for conversations that clients asked to keep (field keep), in MiB; beyond it the least recently used "
        "are forgotten. 0: none is kept.",
        at_least=0,
    )
    kept_conversations_ttl: float = _http(
        3600.0, "Seconds after its last use at which a kept conversation is forgotten.", at_least=0
    )
    step_timeout: float = _http(
        30.0,
        "Seconds without a sign of life after which a worker, scheduler or tokenizer process is killed and replaced; a worker "
        "may take 20 times its longest step, if that is longer. 0: never.",
        at_least=0,
    )
    shutdown_grace: float = _http(
        30.0, "Seconds in which running answers may finish after SIGTERM.", at_least=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = _http("info", "How much to log.")

    device: Literal["auto", "cpu", "cuda"] = _device(
        "auto", "Where the model runs; auto: a GPU if there is one."
    )
    tp: int = _device(1, "Tensor-parallel ranks, one worker process each.", at_least=1)
    attention_backend: Literal["auto", "cpu", "flashinfer", "torch_reference"] = _device(
        "auto", "Which kernels compute attention; auto: the fastest that runs on the device."
    )
    kernel_threads: int | None = _device(
        None,
        "Threads that compute on a CPU, in each rank; one a core that the server may use if not given, and a single one for "
        "small models.",
        at_least=1,
    )
    disable_cascade: bool = _device(
        False,
        "Let each sequence read the prefix that it shares with others by itself (for measurements).",
    )
    cuda_graph_max_batch_size: int = _device(
        256,
        "Decode steps of up to so many sequences are captured as CUDA graphs at the start, at most "
        "--max-running-requests. Larger ones launch their kernels one by one.",
        at_least=1,
        at_most=4096,
    )
    disable_cuda_graph: bool = _device(
        False, "Capture no decode steps as CUDA graphs: a faster start and slower steps."
    )
    mem_fraction_static: float = _memory(
        0.85,
        "Share of the device's memory that weights, the largest step and the KV pool may fill (on a CPU: the pool, of "
        "half of the available memory, up to 8 GiB).",
        at_least=0.05,
        at_most=0.98,
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = _memory(
        "auto",
        "Type of the KV cache; auto: that of the activations. fp8_e4m3 holds twice the tokens of bfloat16 and rounds "
        "each number to 3 bits of mantissa.",
    )
    max_total_tokens: int | None = _memory(
        None, "Size of the KV pool in tokens; computed from the memory if not given.", at_least=1
    )
    page_size: int = _memory(
        16,
        "Tokens in a page of KV cache: prefixes are shared in whole pages.",
        at_least=1,
        at_most=1024,
    )
    eviction_policy: Literal["lru", "fifo", "priority", "duel"] = _memory(
        "duel",
        "What leaves the KV cache first: lru the least recently used, fifo the oldest, priority what the least urgent "
        "requests used, duel the better of lru and of who is least likely to come back, and last what waiting "
        "requests will use. What clients hint goes before that in each.",
    )
    max_pinned_fraction: float = _memory(
        0.5,
        "Share of the KV pool that clients may pin in the cache at a time (POST /v1/cache/pin); 0: none.",
        at_least=0,
        at_most=1,
    )
    max_pin_seconds: float = _memory(3600.0, "Longest time that a pin may ask for.", at_least=0)
    disable_radix_cache: bool = _memory(
        False, "Share no prefixes between requests (for measurements)."
    )

    max_running_requests: int = _scheduling(
        256, "Most sequences in the running batch.", at_least=1, at_most=65536
    )
    max_queued_requests: int = _scheduling(
        4096,
        "Most sequences that may wait; beyond it requests get status 503 with Retry-After.",
        at_least=1,
    )
    max_prefill_tokens: int | None = _scheduling(
        None,
        "Most prompt tokens computed in one step, over all sequences; 8192 on a GPU and 512 on a CPU if not given, where "
        "larger steps are no faster and running answers wait for them.",
        at_least=1,
    )
    chunked_prefill_size: int = _scheduling(
        2048, "Most prompt tokens of one sequence computed in one step.", at_least=1
    )
    schedule_policy: Literal["lpm", "suf", "fcfs", "priority"] = _scheduling(
        "lpm",
        "Order of the waiting queue: longest prefix match with every 4th pick the oldest, shortest uncached prefill "
        "with every 8th the oldest, first come first served, or by the requests' priority (the smallest first; "
        "within one as lpm).",
    )
    disable_overlap_schedule: bool = _scheduling(
        False, "Plan a step only when the one before it is back (for debugging)."
    )

    request_log: str | None = _scheduling(
        None,
        "Write a line for each request that ends: times, lengths, and which prompts begin alike, but no text; to "
        "replay with radixrt bench cache.",
        metavar="FILE",
    )

    kv_events: str | None = _kv_events(
        None,
        "Publish which blocks enter and leave the KV cache on this ZeroMQ address (tcp://127.0.0.1:5557 or "
        "ipc:///run/radixrt/kv-events), for routers; see kv_events.md. Whoever can connect can read it.",
        metavar="ADDRESS",
    )
    kv_events_replay: str | None = _kv_events(
        None,
        "Answer subscribers that have missed some of it on this ZeroMQ address.",
        metavar="ADDRESS",
    )
    kv_events_buffer: int = _kv_events(
        10_000,
        "Most batches kept for replays (at most 32 MiB of them); who lacks more gets a snapshot.",
        at_least=0,
        at_most=1_000_000,
    )
    kv_events_tokens: bool = _kv_events(
        False,
        "Publish also the token ids of the blocks. They are the prompts and answers of all users.",
    )

    grammar_backend: Literal["auto", "llguidance", "xgrammar", "outlines"] = _structured(
        "auto",
        "Which library enforces structured output; auto: for each constraint the one that is measured to enforce it. "
        "A named one gets all that it can enforce, and is under the same audit.",
    )
    grammar_whitespace: Literal["flexible", "compact"] = _structured(
        "flexible",
        "White space in constrained JSON: flexible lets the model indent, compact allows none.",
    )
    grammar_compile_timeout: float = _structured(
        10.0,
        "Seconds that a grammar may take to compile; then its request is refused.",
        at_least=0.1,
        at_most=3600,
    )
    grammar_compile_memory: int = _structured(
        1 << 30,
        "Bytes of memory that a grammar may take to compile; then its request is refused.",
        at_least=64 << 20,
    )
    structured_retries: int = _structured(
        16,
        "How often a part of an answer that breaks its schema is taken back and tried again before the request fails.",
        at_least=0,
        at_most=1024,
    )
    validate_structured_output: bool = _structured(
        False,
        "Check every finished answer once more against its schema; a mismatch is a bug: it is logged and counted.",
    )
    disable_jump_forward: bool = _structured(
        False, "Sample also where the grammar leaves one token only (for measurements)."
    )
    tool_call_parser: Literal["hermes", "llama3_json"] = _structured(
        "hermes",
        "How the model writes tool calls: hermes (Qwen and Hermes: in tool_call tags) or llama3_json (Llama 3: the "
        "call alone, as JSON).",
    )
    reasoning_parser: Literal["none", "deepseek-r1", "qwen3"] = _structured(
        "none",
        "How the model marks the thought before its answer, which is given out apart from it: deepseek-r1 (the "
        "answer begins inside a thought) and qwen3 (it may think), both in think tags.",
    )

    def prefill_budget(self, device: str) -> int:
        """Most prompt tokens of one step on ``device`` ("cpu", "cuda:0")."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        return 512 if device == "cpu" else 8192

    def validate(self) -> "ServerConfig":
        """Return self.

        Raises:
            ConfigError: a value is of the wrong type or out of its range.
        """
        for setting in dataclasses.fields(self):
            _check_value(setting, getattr(self, setting.name))
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"--max-total-tokens {self.max_total_tokens} is less than one page of {self.page_size} tokens "
                "(--page-size)."
            )
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError(
                "--api-key is empty, so no client could send it; leave it out or set it."
            )
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"--chat-template {self.chat_template}: there is no such file.")
        self._validate_kv_events()
        return self

    def _validate_kv_events(self) -> None:
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and not address.startswith(("tcp://", "ipc://")):
                raise ConfigError(
                    f"{flag_of(name)} {address} is no ZeroMQ address: write tcp://IP:PORT or ipc://FILE."
                )
        if self.kv_events is None and (self.kv_events_replay or self.kv_events_tokens):
            raise ConfigError("--kv-events-replay and --kv-events-tokens need --kv-events ADDRESS.")
        if self.kv_events is not None and self.disable_radix_cache:
            raise ConfigError(
                "--kv-events has nothing to tell with --disable-radix-cache: leave one out."
            )

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        return self.served_model_name or self.model_path.rstrip("/").split("/")[-1]


def _check_value(setting: Field, value: Any) -> None:
    flag, kind = flag_of(setting.name), Kind.of(setting)
    if value is None and kind.optional:
        return
    if value is None:
        raise ConfigError(f"{flag} needs a value.")
    if kind.choices and value not in kind.choices:
        raise ConfigError(f"{flag} must be one of {', '.join(kind.choices)}, not {value!r}.")
    accepted = (int, float) if kind.type is float else (kind.type,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind.type is not bool):
        raise ConfigError(f"{flag} must be of type {kind.type.__name__}, not {value!r}.")
    low, high = setting.metadata.get("at_least"), setting.metadata.get("at_most")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{flag} must be {bounds}, not {value}.")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


class Kind(NamedTuple):
    """A setting's annotation, taken apart."""

    type: type
    optional: bool
    choices: tuple[str, ...] = ()

    @staticmethod
    def of(setting: Field) -> "Kind":
        annotation: Any = setting.type
        optional = isinstance(annotation, types.UnionType)
        if optional:
            annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
        if typing.get_origin(annotation) is Literal:
            return Kind(str, optional, typing.get_args(annotation))
        return Kind(annotation, optional)
