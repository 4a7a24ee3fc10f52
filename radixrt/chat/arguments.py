"""Flags of ``radixrt run`` and ``radixrt chat``."""

import argparse
import os


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of both commands."""
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
        type=float,
        help="sampling temperature; 0 takes the most probable token (default: the model's)",
    )
    chat.add_argument(
        "--max-tokens",
        type=int,
        metavar="INT",
        help="longest answer in tokens (default: the server's)",
    )


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt chat``."""
    parser.add_argument(
        "--base-url",
        default=os.environ.get("RADIXRT_URL", "http://127.0.0.1:30000"),
        help="address of an OpenAI-compatible server, with or without /v1 (default: %(default)s; environment variable RADIXRT_URL)",
    )
    parser.add_argument(
        "--model", help="name of the model (default: the first one that the server lists)"
    )
    parser.add_argument(
        "--api-key", help="key of the server (default: environment variable RADIXRT_API_KEY)"
    )
    add_chat_arguments(parser)
