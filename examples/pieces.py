"""Sends a prompt in pieces, and compares the tokens left to compute with those of the whole at once.

    radixrt serve
    python examples/pieces.py [--base-url http://127.0.0.1:30000] [--pause 0.5]

While a user types, a tool prints or passages are retrieved, the server computes what has arrived.
"""

import argparse
import json
import time
import urllib.request
from typing import Any

PIECES = [f"Ship {number} carries {number * 7} barrels of salt to the port of Teska. " for number in range(12)]  # fmt: skip
QUESTION = "How many barrels does ship 3 carry?"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def left_to_compute(answer: dict[str, Any]) -> int:
    """Prompt tokens that were not in the cache when the request came."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two pieces")
    arguments = parser.parse_args()
    url, sampling = arguments.base_url, {"max_tokens": 16, "temperature": 0}
    whole = [{"role": "user", "content": "".join(PIECES) + QUESTION}]
    at_once = post(f"{url}/v1/chat/completions", {"messages": whole, "cache_salt": "1"} | sampling)

    salt = {"cache_salt": "2"}  # it finds nothing of the first request
    opened = post(f"{url}/v1/prompts", {"messages": [{"role": "user", "content": ""}]} | salt)
    path = f"{url}/v1/prompts/{opened['id']}"
    for piece in PIECES:
        post(path, {"text": piece} | salt)
        time.sleep(arguments.pause)
    post(path, {"text": QUESTION} | salt)
    committed = post(f"{path}/commit", sampling | salt)

    print(f"at once: {left_to_compute(at_once)} tokens to compute")
    print(f"in pieces: {left_to_compute(committed)} tokens to compute after the last piece")
    texts = [answer["choices"][0]["message"]["content"] for answer in (at_once, committed)]
    print("the answers are equal" if texts[0] == texts[1] else f"the answers differ: {texts}")


if __name__ == "__main__":
    main()
