"""Asks for an answer with its receipt, checks the receipt's digests, and writes it to a file.

    radixrt serve --receipts
    python examples/receipt.py [--base-url http://127.0.0.1:30000/v1] [--out receipt.json]
    radixrt verify receipt.json --model-path demo

A receipt of an answer about images is verified with their files: `--image FILE` for each.

The digests need nothing but SHA-256 and JSON with sorted keys. That the answer follows from the rest is what
`radixrt verify` finds out.
"""

import argparse
import hashlib
import json
import urllib.request
from pathlib import Path
from typing import Any

CHAINED = ("engine", "settings", "prompt_ids", "images", "parameters", "token_ids")
"""Receipts of answers about images have ``images``, the digest of each; those of text have not."""


def chain_of(receipt: dict[str, Any]) -> list[str]:
    """The digests that the receipt should have."""
    digests, before = [], f"radixrt receipt {receipt['version']}"
    for name in [name for name in CHAINED if name in receipt]:
        content = json.dumps(
            receipt[name], sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        before = hashlib.sha256(f"{before}\n{content}".encode()).hexdigest()
        digests.append(before)
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--out", default="receipt.json")
    arguments = parser.parse_args()
    body = {"prompt": "The owner of Vidur is", "max_tokens": 20, "receipt": True}
    request = urllib.request.Request(
        f"{arguments.base_url}/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        (choice,) = json.load(response)["choices"]
    receipt = choice["receipt"]
    assert receipt["chain"] == chain_of(receipt), "the receipt was changed"
    Path(arguments.out).write_text(json.dumps(receipt))
    print(f"{len(receipt['token_ids'])} tokens, receipt {receipt['chain'][-1][:16]}")
    print(f"radixrt verify {arguments.out} --model-path MODEL")


if __name__ == "__main__":
    main()
