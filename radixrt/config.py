"""Every setting of a server, declared once: the command line, the docs table and the checks come from here."""

import argparse
import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from radixrt.errors import ConfigError

DEMO_MODEL = "demo"
"""The value of ``--model-path`` that stands for the model inside the package."""


def setting(
    default: Any,
    help: str,
    *,
    group: str,
    at_least: float | None = None,
    at_most: float | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that knows its help text, its section of the docs and its range."""
    metadata = {
        "help": help,
        "group": group,
        "at_least": at_least,
        "at_most": at_most,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one engine and its server. Field ``max_total_tokens`` is flag ``--max-total-tokens``."""

    model_path: str = setting(
        DEMO_MODEL,
        "Folder of a Hugging Face checkpoint, or a hub id to download. The default is the small demonstration "
        "model that comes with radixrt.",
        group="Model",
        metavar="DIR_OR_HUB_ID",
    )
    tokenizer_path: str | None = setting(
        None,
        "Folder or hub id of the tokenizer, where it is not beside the weights.",
        group="Model",
    )
    served_model_name: str | None = setting(
        None,
        "Name of the model in the API; the last part of the model path if not given.",
        group="Model",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = setting(
        "auto",
        "auto and safetensors read the checkpoint's safetensors files; dummy fills the weights with seeded random "
        "numbers (only config.json and a tokenizer are needed).",
        group="Model",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Type of weights and activations; auto: the checkpoint's own.",
        group="Model",
    )
    quantization: Literal["auto", "int8", "int4", "fp8"] = setting(
        "auto",
        "Form of the linear layers' weights. auto: as the checkpoint has them (plain, AWQ, GPTQ or fp8); int8, int4 and "
        "fp8 round a plain checkpoint while it is loaded. fp8 rounds activations too, and is fast on GPUs that multiply "
        "8-bit floats (Ada, Hopper and later).",
        group="Model",
    )
    context_length: int | None = setting(
        None, "Longest prompt plus answer, in tokens; at most (and by default) what the checkpoint says.",
        group="Model", at_least=1,
    )  # fmt: skip
    chat_template: str | None = setting(
        None,
        "File with a Jinja chat template that replaces the tokenizer's own.",
        group="Model",
        metavar="FILE",
    )
    trust_remote_code: bool = setting(
        False,
        "Let transformers run Python code that comes with the tokenizer or config. Off, because such code can do "
        "anything that you can do; the models themselves never need it.",
        group="Model",
    )
    random_seed: int = setting(
        0, "Seed of dummy weights and of requests that bring none.", group="Model", at_least=0
    )

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", group="HTTP server")
    port: int = setting(
        30000,
        "TCP port to listen on; 0 picks a free one.",
        group="HTTP server",
        at_least=0,
        at_most=65535,
    )
    api_key: str | None = setting(
        None,
        "Clients must send this as a bearer token. /health, /ping and /metrics stay open.",
        group="HTTP server",
    )
    hide_cache_texts: bool = setting(
        False,
        "Let /v1/cache/tree show sizes alone, and no text of prompts. (It never shows text of requests with a "
        "cache_salt.)",
        group="HTTP server",
    )
    max_body_bytes: int = setting(
        32 << 20,
        "A larger request body is refused with status 413.",
        group="HTTP server",
        at_least=1024,
    )
    kept_conversations_mb: int = setting(
        256,
        "Memory for conversations that clients asked to keep (field keep), in MiB; beyond it the least recently used "
        "are forgotten. 0: none is kept.",
        group="HTTP server",
        at_least=0,
    )
    kept_conversations_ttl: float = setting(
        3600.0,
        "Seconds after its last use at which a kept conversation is forgotten.",
        group="HTTP server",
        at_least=0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "How much to log.", group="HTTP server"
    )

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Where the model runs; auto: a GPU if there is one.", group="Device"
    )
    tp: int = setting(
        1, "Tensor-parallel ranks, one worker process each.", group="Device", at_least=1
    )
    attention_backend: Literal["auto", "cpu", "flashinfer", "torch_reference"] = setting(
        "auto",
        "Which kernels compute attention; auto: the fastest that runs on the device.",
        group="Device",
    )
    kernel_threads: int | None = setting(
        None,
        "Threads that compute on a CPU, in each rank; one a core that the server may use if not given, and a single one for "
        "small models.",
        group="Device",
        at_least=1,
    )
    disable_cascade: bool = setting(
        False,
        "Let each sequence read the prefix that it shares with others by itself (for measurements).",
        group="Device",
    )
    cuda_graph_max_batch_size: int = setting(
        256,
        "Decode steps of up to so many sequences are captured as CUDA graphs at the start, at most "
        "--max-running-requests. Larger ones launch their kernels one by one.",
        group="Device",
        at_least=1,
        at_most=4096,
    )
    disable_cuda_graph: bool = setting(
        False,
        "Capture no decode steps as CUDA graphs: a faster start and slower steps.",
        group="Device",
    )
    mem_fraction_static: float = setting(
        0.85, "Share of the device's memory that weights, the largest step and the KV pool may fill (on a CPU: the pool, of "
        "half of the available memory, up to 8 GiB).",
        group="Memory", at_least=0.05, at_most=0.98,
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = setting(
        "auto",
        "Type of the KV cache; auto: that of the activations. fp8_e4m3 holds twice the tokens of bfloat16 and rounds "
        "each number to 3 bits of mantissa.",
        group="Memory",
    )
    max_total_tokens: int | None = setting(
        None,
        "Size of the KV pool in tokens; computed from the memory if not given.",
        group="Memory",
        at_least=1,
    )
    page_size: int = setting(
        16,
        "Tokens in a page of KV cache: prefixes are shared in whole pages.",
        group="Memory",
        at_least=1,
        at_most=1024,
    )
    eviction_policy: Literal["lru", "fifo", "priority", "duel"] = setting(
        "duel",
        "What leaves the KV cache first: lru the least recently used, fifo the oldest, priority what the least urgent "
        "requests used, duel the better of lru and of who is least likely to come back, and last what waiting "
        "requests will use. What clients hint goes before that in each.",
        group="Memory",
    )
    max_pinned_fraction: float = setting(
        0.5,
        "Share of the KV pool that clients may pin in the cache at a time (POST /v1/cache/pin); 0: none.",
        group="Memory",
        at_least=0,
        at_most=1,
    )
    max_pin_seconds: float = setting(
        3600.0, "Longest time that a pin may ask for.", group="Memory", at_least=0
    )
    disable_radix_cache: bool = setting(
        False, "Share no prefixes between requests (for measurements).", group="Memory"
    )

    max_running_requests: int = setting(
        256, "Most sequences in the running batch.", group="Scheduling", at_least=1, at_most=65536
    )
    max_queued_requests: int = setting(
        4096, "Most sequences that may wait; beyond it requests get status 503 with Retry-After.",
        group="Scheduling", at_least=1,
    )  # fmt: skip
    max_prefill_tokens: int | None = setting(
        None,
        "Most prompt tokens computed in one step, over all sequences; 8192 on a GPU and 512 on a CPU if not given, where "
        "larger steps are no faster and running answers wait for them.",
        group="Scheduling",
        at_least=1,
    )
    chunked_prefill_size: int = setting(
        2048,
        "Most prompt tokens of one sequence computed in one step.",
        group="Scheduling",
        at_least=1,
    )
    schedule_policy: Literal["lpm", "suf", "fcfs", "priority"] = setting(
        "lpm",
        "Order of the waiting queue: longest prefix match with every 4th pick the oldest, shortest uncached prefill "
        "with every 8th the oldest, first come first served, or by the requests' priority (the smallest first; "
        "within one as lpm).",
        group="Scheduling",
    )
    disable_overlap_schedule: bool = setting(
        False,
        "Plan a step only when the one before it is back (for debugging).",
        group="Scheduling",
    )

    request_log: str | None = setting(
        None,
        "Write a line for each request that ends: times, lengths, and which prompts begin alike, but no text; to "
        "replay with radixrt bench cache.",
        group="Scheduling",
        metavar="FILE",
    )

    kv_events: str | None = setting(
        None,
        "Publish which blocks enter and leave the KV cache on this ZeroMQ address (tcp://127.0.0.1:5557 or "
        "ipc:///run/radixrt/kv-events), for routers; see kv_events.md. Whoever can connect can read it.",
        group="KV events",
        metavar="ADDRESS",
    )
    kv_events_replay: str | None = setting(
        None,
        "Answer subscribers that have missed some of it on this ZeroMQ address.",
        group="KV events",
        metavar="ADDRESS",
    )
    kv_events_buffer: int = setting(
        10_000,
        "Most batches kept for replays (at most 32 MiB of them); who lacks more gets a snapshot.",
        group="KV events",
        at_least=0,
        at_most=1_000_000,
    )
    kv_events_tokens: bool = setting(
        False,
        "Publish also the token ids of the blocks. They are the prompts and answers of all users.",
        group="KV events",
    )

    grammar_backend: Literal["auto", "llguidance", "xgrammar", "outlines"] = setting(
        "auto",
        "Which library enforces structured output; auto: for each constraint the one that is measured to enforce it. "
        "A named one gets all that it can enforce, and is under the same audit.",
        group="Structured output",
    )
    grammar_whitespace: Literal["flexible", "compact"] = setting(
        "flexible",
        "White space in constrained JSON: flexible lets the model indent, compact allows none.",
        group="Structured output",
    )
    grammar_compile_timeout: float = setting(
        10.0,
        "Seconds that a grammar may take to compile; then its request is refused.",
        group="Structured output",
        at_least=0.1,
        at_most=3600,
    )
    grammar_compile_memory: int = setting(
        1 << 30,
        "Bytes of memory that a grammar may take to compile; then its request is refused.",
        group="Structured output",
        at_least=64 << 20,
    )
    structured_retries: int = setting(
        16,
        "How often a part of an answer that breaks its schema is taken back and tried again before the request fails.",
        group="Structured output",
        at_least=0,
        at_most=1024,
    )
    validate_structured_output: bool = setting(
        False,
        "Check every finished answer once more against its schema; a mismatch is a bug: it is logged and counted.",
        group="Structured output",
    )
    disable_jump_forward: bool = setting(
        False,
        "Sample also where the grammar leaves one token only (for measurements).",
        group="Structured output",
    )
    tool_call_parser: Literal["hermes", "llama3_json"] = setting(
        "hermes",
        "How the model writes tool calls: hermes (Qwen and Hermes: in tool_call tags) or llama3_json (Llama 3: the "
        "call alone, as JSON).",
        group="Structured output",
    )
    reasoning_parser: Literal["none", "deepseek-r1", "qwen3"] = setting(
        "none",
        "How the model marks the thought before its answer, which is given out apart from it: deepseek-r1 (the "
        "answer begins inside a thought) and qwen3 (it may think), both in think tags.",
        group="Structured output",
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
        for setting_field in dataclasses.fields(self):
            _check_value(setting_field, getattr(self, setting_field.name))
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


def _check_value(setting_field: dataclasses.Field, value: Any) -> None:
    flag = flag_of(setting_field.name)
    kind = _Kind.of(setting_field)
    if value is None:
        if not kind.optional:
            raise ConfigError(f"{flag} needs a value.")
        return
    if kind.choices and value not in kind.choices:
        raise ConfigError(f"{flag} must be one of {', '.join(kind.choices)}, not {value!r}.")
    accepted = (int, float) if kind.type is float else (kind.type,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind.type is not bool):
        raise ConfigError(f"{flag} must be of type {kind.type.__name__}, not {value!r}.")
    low, high = setting_field.metadata["at_least"], setting_field.metadata["at_most"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{flag} must be {bounds}, not {value}.")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class _Kind:
    """A field's annotation, taken apart."""

    type: type
    optional: bool
    choices: tuple[str, ...]

    @staticmethod
    def of(setting_field: dataclasses.Field) -> "_Kind":
        annotation: Any = setting_field.type
        optional = isinstance(annotation, types.UnionType)
        if optional:
            annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
        if typing.get_origin(annotation) is Literal:
            return _Kind(str, optional, typing.get_args(annotation))
        return _Kind(annotation, optional, ())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare one flag for each setting, in the groups of the docs."""
    groups: dict[str, Any] = {}
    for setting_field in dataclasses.fields(ServerConfig):
        name, metadata = setting_field.name, setting_field.metadata
        group = groups.setdefault(metadata["group"], None) or parser.add_argument_group(
            metadata["group"]
        )
        groups[metadata["group"]] = group
        kind = _Kind.of(setting_field)
        options: dict[str, Any] = {
            "dest": name,
            "default": setting_field.default,
            "help": _help(setting_field),
        }
        if kind.type is bool:
            group.add_argument(flag_of(name), action="store_true", **options)
        else:
            metavar = metadata["metavar"] or (None if kind.choices else kind.type.__name__.upper())
            group.add_argument(
                flag_of(name),
                type=kind.type,
                choices=kind.choices or None,
                metavar=metavar,
                **options,
            )


def _help(setting_field: dataclasses.Field) -> str:
    default = setting_field.default
    text = setting_field.metadata["help"].replace("%", "%%")
    return text if default is None or default is False else f"{text} (default: {default})"


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The validated config of a parsed command line."""
    names = [f.name for f in dataclasses.fields(ServerConfig)]
    return ServerConfig(**{name: getattr(arguments, name) for name in names}).validate()


def markdown_page() -> str:
    """docs/server.md: how to start a server, and every setting."""
    lines = [_PAGE_HEAD]
    group = None
    for setting_field in dataclasses.fields(ServerConfig):
        metadata, kind = setting_field.metadata, _Kind.of(setting_field)
        if metadata["group"] != group:
            group = metadata["group"]
            lines += [
                "",
                f"## {group}",
                "",
                "| flag | value | default | meaning |",
                "|---|---|---|---|",
            ]
        value = "switch" if kind.type is bool else " \\| ".join(kind.choices) or kind.type.__name__
        default = "off" if kind.type is bool else f"`{setting_field.default}`"
        default = "" if setting_field.default is None else default
        lines.append(
            f"| `{flag_of(setting_field.name)}` | {value} | {default} | {metadata['help']} |"
        )
    return "\n".join(lines) + "\n"


_PAGE_HEAD = """# The server's settings

<!-- Written by `make docs` from radixrt/config.py; a test holds the two together. -->

    radixrt serve --model-path DIR_OR_HUB_ID [flags]
    python -m radixrt.launch_server --model-path DIR_OR_HUB_ID [flags]

are the same. The offline `LLM(model_path, **settings)` takes the same settings as keyword arguments, with
underscores: `LLM(path, page_size=1)`. The server prints its address when it is ready to answer and ends
cleanly on Ctrl-C or SIGTERM; it ends with status 1 and one sentence when it cannot start, or when one of
its processes has died."""

if __name__ == "__main__":
    print(markdown_page(), end="")
