"""Flags of ``radixrt doctor`` and ``radixrt models``."""

import argparse
from pathlib import Path


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of the port to check (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=30000, help="port to check (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="further folders to search for GGUF files, with their subfolders",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
