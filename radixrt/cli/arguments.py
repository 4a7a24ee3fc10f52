"""The flags of all commands but ``serve``, whose flags are the settings, and ``bench``."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.server_url import URL_VARIABLE, add_url_flag
from radixrt.bench.arguments import positive

Declare = Callable[[argparse.ArgumentParser], object]
"""Declares flags of a command."""


def flag(*names: str, **options: Any) -> Declare:
    """Declares one flag or argument."""
    return lambda parser: parser.add_argument(*names, **options)


def in_group(title: str, *flags: Declare) -> Declare:
    """Declares flags under a heading of the help."""

    def declare(parser: argparse.ArgumentParser) -> None:
        group: Any = parser.add_argument_group(title)
        for one in flags:
            one(group)

    return declare


def new_key(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of ``radixrt key``."""
    new = parser.add_subparsers(required=True, metavar="ACTION").add_parser(
        "new", help="print a new key to stderr and its entry for the file of --api-keys to stdout"
    )
    new.add_argument("name", metavar="NAME", help="name of the key")
    new.add_argument("--admin", action="store_true", help="give it the role of an admin")


def agent(parser: argparse.ArgumentParser) -> None:
    """Declare the agent of ``radixrt launch``."""
    agents = ["claude", "codex", "opencode", "aider"]
    parser.usage = f"radixrt launch {{{','.join(agents)}}} [FLAGS] [-- ARGUMENTS OF THE AGENT]"
    parser.add_argument("agent", choices=agents, help="the agent")


def no_url(parser: argparse.ArgumentParser) -> None:
    """Let ``--url`` have no default."""
    parser.set_defaults(url=None)


def as_json(what: str) -> Declare:
    """Declares ``--json``."""
    return flag("--json", action="store_true", help=f"print the {what} as JSON")


API_KEY = flag("--api-key", help="key of the server (default: environment variable RADIXRT_API_KEY)")  # fmt: skip


SERVE = (
    flag("model", nargs="?", metavar="MODEL", help="model path, hub id or hf:USER/REPO:Q4_K_M, as --model-path (default: the built-in model)"),
)  # fmt: skip
COMPLETION = (flag("shell", choices=["bash", "zsh", "fish", "tcsh"]),)
CHAT = in_group(
    "Chat",
    flag("-p", "--prompt", metavar="TEXT", help="answer TEXT once and end; text that comes through a pipe follows it"),
    flag("--system", metavar="TEXT", help="system prompt"),
    flag("--schema", metavar="FILE", help="hold the answers to the JSON schema in FILE"),
    flag("--temperature", "--temp", type=float, help="sampling temperature; 0 takes the most probable token (default: the model's)"),
    flag("--max-tokens", "--n-predict", "-n", type=int, metavar="INT", help="longest answer in tokens (default: the server's)"),
)  # fmt: skip
RUN = (
    flag("model", nargs="?", metavar="MODEL", help="model path, hub id or hf:USER/REPO:Q4_K_M (default: the running server's, or one that you choose)"),
    CHAT, add_url_flag, no_url,
)  # fmt: skip
REMOTE = (
    add_url_flag, flag("--model", help="name of the model (default: the first one that the server lists)"), API_KEY, CHAT,
)  # fmt: skip
LAUNCH = (
    agent,
    flag("--url", default=os.environ.get(URL_VARIABLE), help="address of a running server (default: environment variable RADIXRT_URL, or the server on the port; if there is none, one is started)"),
)  # fmt: skip
DOCTOR = (
    flag("model", nargs="?", metavar="MODEL", help="a folder, a GGUF file or a name in the hub's cache: can it be served, and does it fit?"),
    flag("--lora", nargs="+", metavar="NAME=PATH", help="LoRA adapters: can they be served with MODEL?"),
    flag("--speed", action="store_true", help="measure how fast this machine reads and multiplies, and which share of that MODEL gets"),
    flag("--host", default="127.0.0.1", help="address of the port to check (default: %(default)s)"),
    flag("--port", type=int, default=30000, help="port to check (default: %(default)s)"),
    as_json("findings"),
)  # fmt: skip
MODELS = (
    flag("folders", nargs="*", type=Path, metavar="DIR", help="further folders to search for GGUF files and checkpoints, with their subfolders"),
    as_json("list"),
)  # fmt: skip
LINT_SCHEMA = (
    flag("files", nargs="+", metavar="FILE", help="a JSON schema"),
    flag("--tokenizer", default=DEMO_MODEL, metavar="DIR", help="folder with tokenizer.json and config.json (default: the built-in model)"),
    as_json("advice"),
)  # fmt: skip
VERIFY = (
    flag("receipt", metavar="RECEIPT", help="a receipt, or a response of the API with receipts, as JSON; - is standard input"),
    flag("--model-path", required=True, metavar="DIR", help="the checkpoint to compute with"),
    flag("--image", action="append", default=[], metavar="FILE", help="an image of the prompt; give all of them, in its order"),
    flag("--mmproj", metavar="FILE", help="the vision tower of a GGUF file, as --mmproj of the server"),
    flag("--max-image-pixels", type=positive, metavar="INT", help="most pixels of an image, as --max-image-pixels of the server"),
)  # fmt: skip
CACHE_INFO = (flag("path", metavar="DIR_OR_BUNDLE", help="a folder of --cache-dir, or a bundle"),)
CACHE_EXPORT = (
    flag("out", metavar="OUT.rdx", help="the bundle"),
    flag("--prefix", nargs="+", required=True, metavar="FILE", help="texts with which prompts begin, or messages of chats as JSON (FILE.json)"),
)  # fmt: skip
CACHE_IMPORT = (
    flag("bundle", metavar="IN.rdx", help="a bundle of `radixrt cache export`"),
    flag("--cache-dir", required=True, metavar="DIR", help="folder of the server's --cache-dir; no server may use it meanwhile"),
    flag("--cache-dir-gb", type=float, default=ServerConfig.cache_dir_gb, metavar="X", help="most disk space of the folder, in GB (default: %(default)s)"),
)  # fmt: skip
LINT_PROMPTS = (
    flag("log", metavar="LOG", help="requests as JSON lines: bodies of requests, or lines of OpenAI's batch files"),
    flag("--model-path", required=True, metavar="DIR_OR_HUB_ID", help="checkpoint whose tokenizer and chat template are used"),
    flag("--chat-template", metavar="FILE", help="Jinja file in place of the checkpoint's chat template"),
    flag("--page-size", type=positive, default=16, metavar="N", help="tokens in a page (default: %(default)s)"),
    flag("--cache-tokens", type=positive, metavar="N", help="size of the cache (default: nothing is evicted)"),
    flag("--prefill-tokens-per-second", type=float, metavar="X", help="prefill rate, to give the loss in seconds (default: measured from the responses in the log, if they have usage and times)"),
    as_json("report"),
)  # fmt: skip
TOP = (
    add_url_flag, API_KEY,
    flag("--interval", type=float, default=1.0, help="seconds between frames (default: %(default)s)"),
    flag("--once", action="store_true", help="print one frame and end"),
)  # fmt: skip
