"""Configures coding agents for a server: base URL, key, model, context, and what keeps the prefix
of their prompts the same from turn to turn.

Nothing is written into the agents' own settings: all goes by environment, flags and a folder that
ends with the agent.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixrt.kv.cache_hint import SESSION_HEADER

PATIENCE_S = 3600
"""Seconds that an agent waits for a token. On a CPU a long first prompt takes minutes, and most
agents give up after five."""


@dataclass(frozen=True)
class Target:
    """The server that an agent is to use."""

    url: str
    """Without ``/v1``."""
    model: str
    key: str
    context: int | None
    """Tokens; None: the server does not list it."""
    session: str
    """The cache session of the agent's requests."""
    folder: Path
    """The folder of files that end with the agent."""

    @property
    def headers(self) -> dict[str, str]:
        return {SESSION_HEADER: self.session}


@dataclass(frozen=True)
class Setup:
    """What an agent is started with."""

    arguments: list[str] = field(default_factory=list)
    """Flags before those of the user."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables to set; an empty value unsets one."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Variables to set where the user has not."""


@dataclass(frozen=True)
class Agent:
    """A coding agent."""

    title: str
    program: str
    install: str
    """The command that installs it."""
    first_prompt: int
    """Tokens of its shortest prompt, about: system prompt and tools. A model with a shorter context
    cannot serve it."""
    setup: Callable[[Target], Setup]


def _claude(target: Target) -> Setup:
    tiers = ("FABLE", "OPUS", "SONNET", "HAIKU")
    aliases = [f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in tiers]
    aliases += ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    environment = dict.fromkeys(aliases, target.model) | {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": "",  # it would ask whether to use it, and warn of two keys
        "ANTHROPIC_CUSTOM_HEADERS": "\n".join(f"{k}: {v}" for k, v in target.headers.items()),
        # A line before the system prompt that differs in every request.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    waits = ("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS")
    defaults = dict.fromkeys(waits, str(1000 * PATIENCE_S))
    if target.context is not None:
        defaults["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(target.context)
        defaults["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(_longest_answer(target.context))
    return Setup([], environment, defaults)


def _codex(target: Target) -> Setup:
    provider: dict[str, Any] = {
        "name": "radixrt",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": "RADIXRT_LAUNCH_KEY",
        "stream_idle_timeout_ms": 1000 * PATIENCE_S,
        "http_headers": target.headers,
    }
    settings: dict[str, Any] = {
        "model_providers.radixrt": provider,
        "model_provider": "radixrt",
        "model": target.model,
        "check_for_update_on_startup": False,
    }
    if target.context is not None:
        settings["model_context_window"] = target.context
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={_toml(value)}")]  # fmt: skip
    return Setup(arguments, {"RADIXRT_LAUNCH_KEY": target.key})


def _opencode(target: Target) -> Setup:
    model: dict[str, Any] = {"name": target.model, "tool_call": True}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": _longest_answer(target.context)}
    options = {
        "baseURL": f"{target.url}/v1",
        "apiKey": target.key,
        "headers": target.headers,
        "timeout": 1000 * PATIENCE_S,
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "radixrt",
        "options": options,
        "models": {target.model: model},
    }
    name = f"radixrt/{target.model}"
    config = {
        "provider": {"radixrt": provider},
        "model": name,
        "small_model": name,
        "autoupdate": False,
        "share": "disabled",
    }
    return Setup(
        environment={
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def _aider(target: Target) -> Setup:
    name = f"openai/{target.model}"
    extra: dict[str, Any] = {"extra_headers": target.headers}
    files: dict[str, Any] = {"model-settings-file": [{"name": name, "extra_params": extra}]}
    if target.context is not None:
        output = extra["max_tokens"] = _longest_answer(target.context)  # the metadata is not sent
        limits = {"max_input_tokens": target.context - output, "max_tokens": output}
        files["model-metadata-file"] = {name: limits | {"litellm_provider": "openai"}}
    arguments = [
        "--model", name, "--openai-api-base", f"{target.url}/v1", "--openai-api-key", target.key,
        "--timeout", str(PATIENCE_S), "--no-check-update", "--no-show-model-warnings",
        # Else the map of the repository, which stands before the conversation, changes with each question.
        "--map-refresh", "files",
    ]  # fmt: skip
    for flag, content in files.items():
        file = target.folder / f"{flag}.yml"
        file.write_text(json.dumps(content))  # YAML is a superset of JSON
        arguments += [f"--{flag}", str(file)]
    return Setup(arguments)


AGENTS = {
    "claude": Agent("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", 20_000, _claude),
    "codex": Agent("Codex", "codex", "npm install -g @openai/codex", 8_000, _codex),
    "opencode": Agent("OpenCode", "opencode", "npm install -g opencode-ai", 10_000, _opencode),
    "aider": Agent("aider", "aider", "python -m pip install aider-install && aider-install", 2_000, _aider),
}  # fmt: skip


def _longest_answer(context: int) -> int:
    """Tokens of an answer that leave most of the context to the prompt."""
    return min(32_000, context // 4)


def _toml(value: Any) -> str:
    """
    >>> _toml({"name": "a", "retries": 2, "headers": {"x-y": "z"}})
    '{"name" = "a", "retries" = 2, "headers" = {"x-y" = "z"}}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
