"""A program that is installed under the names of agents, reads the settings that each of them would
read, and asks two questions of which the second continues the first.

It prints its arguments and its model, and ends with the status of ``FAKE_STATUS``. With ``--wait``
it waits for SIGTERM instead, and then ends with status 9.
"""

import itertools
import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import yaml

FACTS = "The owner of Vidur is Noval. The port of Vidur is Teska. The fee of Vidur is 42. "
QUESTIONS = [FACTS * 4 + "What is the owner of Vidur?", "What is the port of Vidur?"]


def main() -> None:
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    if "--wait" in arguments:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("waiting", flush=True)
        signal.pause()
    settings, own = {"claude": claude, "codex": codex, "opencode": opencode, "aider": aider}[name](
        arguments
    )
    client = httpx.Client(headers=settings["headers"], timeout=60)
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"model": settings["model"], "messages": messages, "max_tokens": 40}
        if name == "codex":
            body = {"model": settings["model"], "input": messages, "store": False}
        answer = client.post(settings["url"], json=body)
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": _text(answer.json())})
    print(json.dumps({"own": own, "model": settings["model"], "answers": messages[1::2]}))
    sys.exit(int(os.environ.get("FAKE_STATUS", "0")))


def _text(body: dict[str, Any]) -> Any:
    if "choices" in body:
        return body["choices"][0]["message"]["content"]
    parts = body["content"] if "content" in body else body["output"][-1]["content"]
    return parts[0]["text"]


def claude(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    env = os.environ
    assert "ANTHROPIC_API_KEY" not in env, "Claude Code would ask which key to use"
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    models = {env[f"ANTHROPIC_DEFAULT_{tier}_MODEL"] for tier in ("OPUS", "SONNET", "HAIKU")}
    assert models == {env["ANTHROPIC_MODEL"]}
    custom = dict(line.split(": ") for line in env["ANTHROPIC_CUSTOM_HEADERS"].splitlines())
    headers = {"authorization": f"Bearer {env['ANTHROPIC_AUTH_TOKEN']}"} | custom
    url = f"{env['ANTHROPIC_BASE_URL']}/v1/messages"
    return {"url": url, "model": env["ANTHROPIC_MODEL"], "headers": headers}, arguments


def codex(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    settings: dict[str, Any] = {}
    while arguments[:1] == ["-c"]:
        name, value = arguments[1].split("=", 1)
        settings[name] = tomllib.loads(f"value = {value}")["value"]
        arguments = arguments[2:]
    provider = settings[f"model_providers.{settings['model_provider']}"]
    assert provider["wire_api"] == "responses" and settings["model_context_window"] > 0
    key = {"authorization": f"Bearer {os.environ[provider['env_key']]}"}
    url = f"{provider['base_url']}/responses"
    return {
        "url": url,
        "model": settings["model"],
        "headers": key | provider["http_headers"],
    }, arguments


def opencode(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    options = config["provider"][provider]["options"]
    limit = config["provider"][provider]["models"][model]["limit"]
    assert 0 < limit["output"] < limit["context"]
    headers = {"authorization": f"Bearer {options['apiKey']}"} | options["headers"]
    return {
        "url": f"{options['baseURL']}/chat/completions",
        "model": model,
        "headers": headers,
    }, arguments


def aider(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    given = dict(itertools.pairwise(arguments))
    name = given["--model"]
    (settings,) = yaml.safe_load(Path(given["--model-settings-file"]).read_text())
    limits = json.loads(Path(given["--model-metadata-file"]).read_text())[name]
    assert settings["name"] == name and limits["max_tokens"] < limits["max_input_tokens"]
    headers = {"authorization": f"Bearer {given['--openai-api-key']}"}
    assert settings["extra_params"]["max_tokens"] == limits["max_tokens"]
    headers |= settings["extra_params"]["extra_headers"]
    url = f"{given['--openai-api-base']}/chat/completions"
    model = name.removeprefix("openai/")
    at = arguments.index(given["--model-metadata-file"])
    return {"url": url, "model": model, "headers": headers}, arguments[at + 1 :]


if __name__ == "__main__":
    main()
