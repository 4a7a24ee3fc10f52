"""Measures the first token of one API key while 100 requests of another wait: ``python -m
bench.fairness [--quick]``.

Bob sends short prompts one after the other: on an idle server, beside a queue of Alice's that never
gets empty, and, for comparison, with Alice's key beside the same queue, where his requests wait
among hers. The ratio of the first two is the promise: at most 2.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import local_server
from bench.markdown import markdown
from bench.overload.load import Load, load_on, require_all
from radixrt.base.api_keys import digest_of
from radixrt.bench.serve import closed_loop

RUNNING = 8
"""Requests of Alice's that run (--max-running-requests); the slots are hers when Bob comes."""
WAITING = 100
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
KEYS = ("alice", "bob", "operator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20, help="of Bob's in each state")
    parser.add_argument("--quick", action="store_true", help="a small model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape: dict[str, Any] = {"hidden_size": 128, "num_layers": 2} if arguments.quick else {}
        model = write_dummy_checkpoint(Path(folder, "model"), **shape)
        keys = Path(folder, "keys.json")
        entries = [{"name": name, "hash": digest_of(name)} for name in KEYS]
        entries[-1]["role"] = "admin"
        keys.write_text(json.dumps({"keys": entries}))
        flags = f"--max-running-requests {RUNNING} --load-format dummy --log-level warning".split()
        with local_server(str(model), "--api-keys", str(keys), *flags) as url:
            rows = asyncio.run(_measure(url, arguments.requests))
    print("\n".join(markdown(rows)))


async def _measure(url: str, count: int) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        alice, bob, operator = [
            await stack.enter_async_context(load_on(url, key, first_seed=1_000_000 * number))
            for number, key in enumerate(KEYS)
        ]
        await _first_tokens(bob, 3)  # warm up
        alone = await _first_tokens(bob, count)
        async with alice.always(
            WAITING + RUNNING, input_len=PROMPT_TOKENS, output_len=OUTPUT_TOKENS
        ):
            while await operator.num_waiting() < 0.9 * WAITING:
                await asyncio.sleep(0.05)
            beside = await _first_tokens(bob, count)
            among = await _first_tokens(alice, max(2, count // 5))
    states = {"idle server": alone, "Alice's queue": beside, "the same key as Alice": among}
    base = statistics.median(alone)
    return [
        {
            "Bob beside": state,
            "requests": len(seen),
            "TTFT p50, ms": f"{1e3 * statistics.median(seen):.1f}",
            "longest": f"{1e3 * max(seen):.1f}",
            "ratio of p50": f"{statistics.median(seen) / base:.2f}",
        }
        for state, seen in states.items()
    ]


async def _first_tokens(load: Load, count: int) -> list[float]:
    """Seconds to the first token of requests one after the other."""
    records = await load.send(count, closed_loop(1), input_len=PROMPT_TOKENS, output_len=4)
    return [record.ttft for record in require_all(records)]


if __name__ == "__main__":
    main()
