"""Declares the flags of all commands but ``serve``, whose flags are the settings, and ``bench``."""

import argparse
import os
from pathlib import Path

from radixrt.base.config import DEMO_MODEL
from radixrt.base.server_url import URL_VARIABLE, add_url_flag
from radixrt.bench.arguments import positive


def add_served_model(parser: argparse.ArgumentParser) -> None:
    """Declare the model of ``radixrt serve``, beside the settings."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model path, hub id or hf:USER/REPO:Q4_K_M, as --model-path (default: the built-in model)")  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``radixrt run``, beside the settings of the server."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model path, hub id or hf:USER/REPO:Q4_K_M (default: the running server's, or one that you choose)")  # fmt: skip
    add_chat_arguments(parser)
    add_url_flag(parser)
    parser.set_defaults(url=None)


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of ``radixrt completion``."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish", "tcsh"])


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt run`` and ``radixrt chat``."""
    chat = parser.add_argument_group("Chat")
    chat.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="answer TEXT once and end; text that comes through a pipe follows it",
    )
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument(
        "--schema", metavar="FILE", help="hold the answers to the JSON schema in FILE"
    )
    chat.add_argument(
        "--temperature",
        "--temp",
        type=float,
        help="sampling temperature; 0 takes the most probable token (default: the model's)",
    )
    chat.add_argument(
        "--max-tokens",
        "--n-predict",
        "-n",
        type=int,
        metavar="INT",
        help="longest answer in tokens (default: the server's)",
    )


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt chat``."""
    add_url_flag(parser)
    parser.add_argument(
        "--model", help="name of the model (default: the first one that the server lists)"
    )
    parser.add_argument(
        "--api-key", help="key of the server (default: environment variable RADIXRT_API_KEY)"
    )
    add_chat_arguments(parser)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``radixrt launch``, beside the settings of the server."""
    parser.usage = (
        "radixrt launch {claude,codex,opencode,aider} [FLAGS] [-- ARGUMENTS OF THE AGENT]"
    )
    parser.add_argument("agent", choices=["claude", "codex", "opencode", "aider"], help="the agent")
    parser.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE),
        help="address of a running server (default: environment variable RADIXRT_URL, or the server on the port; if there is none, one is started)",
    )


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt doctor``."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file or a name in the hub's cache: can it be served, and does it fit?",
    )
    parser.add_argument(
        "--lora",
        nargs="+",
        metavar="NAME=PATH",
        help="LoRA adapters: can they be served with MODEL?",
    )
    parser.add_argument(
        "--speed",
        action="store_true",
        help="measure how fast this machine reads and multiplies, and which share of that MODEL gets",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of the port to check (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=30000, help="port to check (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt models``."""
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="further folders to search for GGUF files and checkpoints, with their subfolders",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of ``radixrt key``."""
    new = parser.add_subparsers(required=True, metavar="ACTION").add_parser(
        "new", help="print a new key to stderr and its entry for the file of --api-keys to stdout"
    )
    new.add_argument("name", metavar="NAME", help="name of the key")
    new.add_argument("--admin", action="store_true", help="give it the role of an admin")


def add_lint_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt lint-schema``."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a JSON schema")
    parser.add_argument(
        "--tokenizer",
        default=DEMO_MODEL,
        metavar="DIR",
        help="folder with tokenizer.json and config.json (default: the built-in model)",
    )
    parser.add_argument("--json", action="store_true", help="print the advice as JSON")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt verify``."""
    parser.add_argument("receipt", metavar="RECEIPT", help="a receipt, or a response of the API with receipts, as JSON; - is standard input")  # fmt: skip
    parser.add_argument("--model-path", required=True, metavar="DIR", help="the checkpoint to compute with")  # fmt: skip


def add_cache_info_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of ``radixrt cache info``."""
    parser.add_argument(
        "path", metavar="DIR_OR_BUNDLE", help="a folder of --cache-dir, or a bundle"
    )


def add_cache_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt cache export``, beside those of the server."""
    parser.add_argument("out", metavar="OUT.rdx", help="the bundle")
    parser.add_argument("--prefix", nargs="+", required=True, metavar="FILE", help="texts with which prompts begin, or messages of chats as JSON (FILE.json)")  # fmt: skip


def add_cache_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt cache import``."""
    parser.add_argument("bundle", metavar="IN.rdx", help="a bundle of `radixrt cache export`")
    parser.add_argument("--cache-dir", required=True, metavar="DIR", help="folder of the server's --cache-dir; no server may use it meanwhile")  # fmt: skip
    parser.add_argument("--cache-dir-gb", type=float, default=10.0, metavar="X", help="most disk space of the folder, in GB (default: %(default)s)")  # fmt: skip


def add_lint_prompts_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt lint-prompts``."""
    parser.add_argument("log", metavar="LOG", help="requests as JSON lines: bodies of requests, or lines of OpenAI's batch files")  # fmt: skip
    parser.add_argument("--model-path", required=True, metavar="DIR_OR_HUB_ID", help="checkpoint whose tokenizer and chat template are used")  # fmt: skip
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja file in place of the checkpoint's chat template")  # fmt: skip
    parser.add_argument("--page-size", type=positive, default=16, metavar="N", help="tokens in a page (default: %(default)s)")  # fmt: skip
    parser.add_argument("--cache-tokens", type=positive, metavar="N", help="size of the cache (default: nothing is evicted)")  # fmt: skip
    parser.add_argument("--prefill-tokens-per-second", type=float, metavar="X", help="prefill rate, to give the loss in seconds (default: measured from the responses in the log, if they have usage and times)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt top``."""
    add_url_flag(parser)
    parser.add_argument(
        "--api-key", help="key of the server (default: environment variable RADIXRT_API_KEY)"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between frames (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
