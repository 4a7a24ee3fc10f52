"""What a setting is: its section of the docs, the kind and range of its values, its flag; and the names that flags take."""

import types
import typing
from collections.abc import Callable
from dataclasses import Field, field
from typing import Any, Literal, NamedTuple

from radixrt.base.errors import ConfigError

# The sets of names that flags take. tests/test_config.py compares each with its registry.
AttentionBackendName = Literal["auto", "cpu", "flashinfer", "torch_reference"]
EvictionPolicyName = Literal["lru", "fifo", "priority"]
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
    "hunyuan",
    "pythonic",
    "olmo3",
    "functiongemma",
    "gemma4",
    "harmony",
]
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

SECTIONS = (
    "Model", "HTTP server", "Device", "Replicas", "Memory", "KV cache", "Scheduling", "KV events", "Structured output", "Debugging"
)  # fmt: skip
"""In the order of the docs."""


def section(name: str) -> Callable[..., Any]:
    """Makes the dataclass fields of one section of the docs: a default, its help text, and perhaps its range
    (``at_least``, ``at_most``), the placeholder of its value in the help (``metavar``) and other names of its values
    (``aliases``). ``several``: the flag takes several values, which the setting holds with spaces between them."""
    assert name in SECTIONS

    def setting(default: Any, help: str, **details: Any) -> Any:
        return field(default=default, metadata={"section": name, "help": help, **details})

    return setting


def check_value(setting: Field, value: Any) -> None:
    """Raises:
    ConfigError: the value is of the wrong type or out of its range.
    """
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


def listed(setting: str | None) -> tuple[str, ...]:
    """The values of a setting that is a list.

    >>> listed("http://a.example, http://b.example")
    ('http://a.example', 'http://b.example')
    """
    return tuple(value.strip() for value in (setting or "").split(",") if value.strip())


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
