"""Measures KV that outlives memory, worker and server: ``python -m bench.cache_dir --only PART``.

    disk       a prompt from disk against computing it, a dummy model of 387 M parameters (bar 0.06)
    cheap      the same with the built-in model, against no directory (bar 1.05)
    slow       the same with a disk at 20 MB/s (bar 1.05)
    gaps       p99 between tokens while pages move, against the same prompts from memory (bar 1.10)
    takeover   the pause of streams whose worker is killed, shared pool on against off (bar 0.3);
               their prompts share a document
    peers      a conversation after a restart, beside llama.cpp's saved slots and its cache in memory

Rounds are interleaved. With the default sizes, each part takes up to four minutes on two cores.
"""

import argparse
from pathlib import Path

from bench.cache_dir.gaps import measure_gaps
from bench.cache_dir.peers import measure_peers
from bench.cache_dir.returning import measure_cheap_model, measure_disk
from bench.cache_dir.takeover import measure_takeover

PARTS = {"disk": 4096, "cheap": 4096, "slow": 4096, "gaps": 1024, "takeover": 4096, "peers": 1500}
"""With the tokens of their prompts."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_dir",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, help="of all parts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32, help="of takeover")
    parser.add_argument("--padded", type=Path, metavar="FOLDER", help="of takeover: a model of bench.padded_demo, which is made if it is not there, in place of dummy weights")  # fmt: skip
    parser.add_argument("--answer-tokens", type=int, default=120, help="of an answer of gaps")
    parser.add_argument("--slow-mb-s", type=float, default=20.0, help="rate of the slow disk")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    for part in arguments.only:
        length = arguments.prompt_tokens or PARTS[part]
        print(f"--- {part}, prompts of {length} tokens", flush=True)
        match part:
            case "disk":
                measure_disk(length, rounds)
            case "cheap":
                measure_cheap_model(length, 5 * rounds, None)
            case "slow":
                measure_cheap_model(length, 5 * rounds, arguments.slow_mb_s)
            case "gaps":
                measure_gaps(length, rounds, arguments.answer_tokens)
            case "takeover":
                measure_takeover(length, arguments.streams, arguments.padded)
            case _:
                measure_peers(length)


if __name__ == "__main__":
    main()
