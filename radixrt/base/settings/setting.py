"""What a setting is: its section of the docs, the kind and range of its values, its flag; and the
names that flags take."""

import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from radixrt.base.errors import ConfigError

# The sets of names that flags take. tests/test_config.py compares each with its registry.
AttentionBackendName = Literal["auto", "cpu", "flashinfer", "torch_reference"]
EvictionPolicyName = Literal["value", "lru", "fifo", "priority"]
SchedulePolicyName = Literal["lpm", "suf", "fcfs", "priority"]
GrammarBackendName = Literal["auto", "llguidance", "fsm"]
WhitespaceName = Literal["flexible", "compact"]
MetricsPeerName = Literal["vllm", "sglang"]
METRICS_PEERS: tuple[MetricsPeerName, ...] = typing.get_args(MetricsPeerName)
ToolCallParserName = Literal[
    "auto",
    "none",
    "hermes",
    "exaone4",
    "llama3_json",
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "glm45",
    "glm47",
    "mistral",
    "mistral_v3",
    "granite",
    "phi4_mini",
    "nemotron_json",
    "falcon",
    "hunyuan",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "pythonic",
    "lfm2",
    "olmo3",
    "functiongemma",
    "gemma4",
    "harmony",
]
TOOL_CALL_ALIASES = {
    "qwen25": "hermes",
    "granite4": "hermes",
    "ernie45": "hermes",
    "llama3": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "minimax-m2": "minimax_m2",
    "phi4_mini_json": "phi4_mini",
    "openai": "harmony",
    "gpt-oss": "harmony",
}
ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek-r1",
    "qwen3",
    "seed_oss",
    "hunyuan",
    "ernie45",
    "granite",
    "granite33",
    "mistral",
    "gemma4",
    "harmony",
]
REASONING_ALIASES = {
    "deepseek_r1": "deepseek-r1",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "minimax_m2": "qwen3",
    "olmo3": "qwen3",
    "hunyuan_a13b": "hunyuan",
    "openai_gptoss": "harmony",
    "gpt-oss": "harmony",
}

# Patterns of values, and what errors call a value.
ORIGIN = (
    r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+",
    "origin: write it as https://chat.example.com or http://localhost:3000, in small letters and "
    "without a path",
)
METRICS_PEER = "|".join(METRICS_PEERS), f"name: write {' or '.join(METRICS_PEERS)}"
TCP_ADDRESS = r"tcp://[^/\s]+:\d+", "address: write tcp://HOST:PORT"
ZMQ_ADDRESS = r"(tcp|ipc)://.*", "ZeroMQ address: write tcp://IP:PORT or ipc://FILE"

SECTIONS = (
    "Model", "Several models", "HTTP server", "Device", "Replicas", "Memory", "KV cache", "Scheduling", "KV events",
    "Structured output", "Debugging",
)  # fmt: skip
"""Sections in the order of the docs."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, as it was declared: flags, the settings file, the docs and the checks follow
    from this."""

    name: str
    type: type[Any]
    default: Any
    optional: bool
    """None is a value, and means that the engine decides."""
    choices: tuple[str, ...] = ()
    """The values of a setting with few; empty: any value of the type."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of choices."""
    within: tuple[float, float | None] | None = None
    """The least and the greatest value; None in place of the latter: it has no bound."""
    form: tuple[str, str] | None = None
    """A pattern of each of its values, and what errors call one."""
    section: str
    help: str
    metavar: str = ""
    """Stands for the value in the help; "": the name of the type."""
    several: bool = False
    """The flag takes several values, which the setting holds with spaces between them."""

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    def check(self, value: Any) -> Any:
        """Return the value, or the choice that it is an alias of.

        Raises:
            ConfigError: it is of the wrong type or out of its range.
        """
        if value is None and self.optional:
            return None
        if isinstance(value, str):
            value = self.aliases.get(value, value)
        if value is None:
            raise ConfigError(f"{self.flag} needs a value.")
        if self.choices and value not in self.choices:
            choices = ", ".join(self.choices)
            raise ConfigError(f"{self.flag} must be one of {choices}, not {value!r}.")
        accepted = (int, float) if self.type is float else (self.type,)
        fits = isinstance(value, accepted) and isinstance(value, bool) == (self.type is bool)
        if not fits:
            raise ConfigError(f"{self.flag} must be of type {self.type.__name__}, not {value!r}.")
        low, high = self.within or (None, None)
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ConfigError(f"{self.flag} must be {bounds}, not {value}.")
        pattern, name = self.form or ("", "")
        for one in listed(value) if pattern else ():
            if not re.fullmatch(pattern, one):
                raise ConfigError(f"{self.flag} {one} is not a valid {name}.")
        return value


def section(name: str) -> Callable[..., Any]:
    """Makes the dataclass fields of one section of the docs: a default, its help text, and further
    fields of :class:`Setting`."""

    def declare(default: Any, help: str, **details: Any) -> Any:
        return field(default=default, metadata={"section": name, "help": help, **details})

    return declare


def settings_of(config: type) -> dict[str, Setting]:
    """The settings that a dataclass declares, by name."""
    found = {}
    for declared in fields(config):
        kind: Any = declared.type
        optional = isinstance(kind, types.UnionType)
        if optional:
            kind = next(one for one in typing.get_args(kind) if one is not types.NoneType)
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        found[declared.name] = Setting(
            name=declared.name,
            type=str if choices else kind,
            default=declared.default,
            optional=optional,
            choices=choices,
            **declared.metadata,
        )
    return found


def listed(setting: str | None) -> tuple[str, ...]:
    """The values of a setting that is a list.

    >>> listed("http://a.example, http://b.example")
    ('http://a.example', 'http://b.example')
    """
    return tuple(value.strip() for value in (setting or "").split(",") if value.strip())


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
