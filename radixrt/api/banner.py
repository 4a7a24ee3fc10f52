"""The text that the terminal shows when the server is ready: address, example command,
documentation."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixrt import __version__
from radixrt.api.http.browsers import ANY, accepted_names, is_loopback
from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.server_url import local_url
from radixrt.base.settings.setting import listed
from radixrt.messages.answers import EngineInfo

_DEMO_QUESTION = (
    "The owner of Bramol is Teska. The owner of Vidur is Noval. What is the owner of Vidur?"
)
_QUESTION = "Why is the sky blue?"
_NO_TEMPLATE = """The model has no chat template: it continues texts (/v1/completions). --chat-template FILE gives it one for chats.
"""


def banner(
    config: ServerConfig,
    info: EngineInfo,
    host: str,
    port: int,
    *,
    others: Sequence[str] = (),
    needs_key: bool = False,
) -> str:
    """The lines to print.

    Args:
        host: to which the socket is bound, as is ``port``.
        others: names of further models.
    """
    url = local_url(host, port, is_https=config.tls_cert is not None)
    docs = Path(__file__).parents[2] / "docs"
    chat = "" if info.has_chat_template or info.pooling is not None else _NO_TEMPLATE
    names = "" if is_loopback(host) else f"\n  names     {_names(config)}"
    loadable = f"\nLoaded when a request names them: {', '.join(others)}" if others else ""
    return f"""
radixrt {__version__} serves {config.model_name} ({info.architecture}, {_short(info.num_parameters)} parameters, \
{info.dtype} on {info.device})
KV cache: {info.kv_pool_tokens:,} tokens in pages of {info.page_size}; context length {info.context_length:,}
Parsers: tool calls {_tool_calls(config)}, reasoning {config.reasoning_parser}{loadable}
{chat}
  page      {url}/   (chat and cache, in a browser)
  clients   base_url={url}/v1 for OpenAI's; {url} for Ollama's and Anthropic's{names}
  docs      {docs if docs.is_dir() else f"{url}/"}
  try       {_request(config, info, url, needs_key=needs_key)}
"""


def greeting(config: ServerConfig, info: EngineInfo, url: str, *, needs_key: bool) -> str:
    """The text for those who ask for / in a terminal: the model's name and three commands."""
    chat = "radixrt chat" if info.pooling is None else "radixrt doctor"
    key = " --api-key YOUR_API_KEY" if needs_key else ""
    return f"""radixrt {__version__} serves {config.model_name}. The page for browsers is {url}/, the list of endpoints {url}/openapi.json.

  {_request(config, info, url, needs_key=needs_key, indent=2)}
  {chat} --url {url}{key}
  radixrt top --url {url}{key}
"""


def _request(
    config: ServerConfig, info: EngineInfo, url: str, *, needs_key: bool, indent: int = 12
) -> str:
    """A request that the model serves, as a command."""
    question = _DEMO_QUESTION if config.model_name == DEMO_MODEL else _QUESTION
    path, body = _example(info, question)
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if needs_key else ""
    return (
        f"curl {url}{path} -H 'Content-Type: application/json'{key} \\\n"
        f"{' ' * (indent + 2)}-d {shlex.quote(json.dumps(body))}"
    )


def _example(info: EngineInfo, question: str) -> tuple[str, dict[str, Any]]:
    """An endpoint that the model serves, and a body for it."""
    if info.pooling is None and not info.has_chat_template:
        return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 50}
    if info.pooling is None:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": question}]}
    if info.pooling.task == "embed":
        return "/v1/embeddings", {"input": question}
    if info.pooling.size == 1:
        return "/v1/rerank", {"query": question, "documents": ["Air scatters blue light."]}
    return "/classify", {"input": question}


def _tool_calls(config: ServerConfig) -> str:
    name = config.tool_call_parser
    return "none (requests with tools need --tool-call-parser)" if name == "none" else name


def _names(config: ServerConfig) -> str:
    names = accepted_names(config.host, listed(config.allowed_hosts))
    if ANY in names:
        return "any"
    return f"{', '.join(names)} and IP addresses; clients that use another name need --allowed-hosts NAME"


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
