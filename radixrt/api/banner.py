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
    question = _DEMO_QUESTION if config.model_name == DEMO_MODEL else _QUESTION
    path, body = _example(info, question)
    key = "" if not needs_key else " -H 'Authorization: Bearer YOUR_API_KEY'"
    docs = Path(__file__).parents[2] / "docs"
    names = "" if is_loopback(host) else f"\n  names     {_names(config)}"
    loadable = f"\nLoaded when a request names them: {', '.join(others)}" if others else ""
    return f"""
radixrt {__version__} serves {config.model_name} ({info.architecture}, {_short(info.num_parameters)} parameters, \
{info.dtype} on {info.device})
KV cache: {info.kv_pool_tokens:,} tokens in pages of {info.page_size}; context length {info.context_length:,}
Parsers: tool calls {_tool_calls(config)}, reasoning {config.reasoning_parser}{loadable}

  address   {url}   (OpenAI clients: base_url={url}/v1){names}
  docs      {docs if docs.is_dir() else f"{url}/"}
  try       curl {url}{path} -H 'Content-Type: application/json'{key} \\
              -d {shlex.quote(json.dumps(body))}
"""


def _example(info: EngineInfo, question: str) -> tuple[str, dict[str, Any]]:
    """An endpoint that the model serves, and a body for it."""
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
