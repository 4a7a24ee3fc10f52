"""Measures the order of retrieved passages: tokens that the server computes by rank and with cached passages first, and the answers.

    python -m bench.rag_order [--questions 2000] [--readers 4] [--books 10] [--passages 8] [--retrieved 5] [--max-shift 2 ...] [--json FILE]

The built-in model answers questions about books of facts that were in no training (examples/rag_pipeline). Each passage has the
facts of two entities. Passages are retrieved by the cosine of hashed letters (``hashed`` of the example), so each question has passages of
its book in an order of its own. Every order gets the same passages for the same question, from an empty cache. Readers have caches of their own (salts) and ask
one question after the other, so the counts of tokens are the same in each run and on each machine. An answer is right if it is the expected sentence.
"""

import argparse
import json
import math
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import radixrt.lang as rl
from bench.local_server import local_server
from bench.markdown import markdown

sys.path.append(str(Path(__file__).parents[1] / "examples" / "rag_pipeline"))

from books import Question, library, visits
from vectors import hashed


@dataclass
class Outcome:
    """Of one order, over all questions."""

    order: str
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reordered: int = 0
    """Questions whose order was not that by rank."""
    right: list[bool] = field(default_factory=list)


@rl.function(temperature=0, max_tokens=48)
def answer(s: rl.State, passages: list[str], question: str, max_shift: int | None) -> None:
    found = rl.documents(passages, order="cached", max_shift=max_shift, name="order")
    s += rl.system("Answer from this text.\n\n" + found)
    s += rl.user(question) + rl.assistant(rl.gen("answer"))


def main() -> None:
    arguments = _parse()
    passages, questions = library(arguments.books, arguments.passages)
    asked = visits(questions, arguments.questions)
    texts = [passage.text for passage in passages]
    cosines = hashed([question.text for question in asked]) @ hashed(texts).T
    retrieved = np.argsort(-cosines, axis=1, kind="stable")[:, : arguments.retrieved]
    ids = [passage.id for passage in passages]
    found = [
        question.source in [ids[i] for i in row]
        for question, row in zip(asked, retrieved, strict=True)
    ]
    print(
        f"{len(asked)} questions about {len(texts)} passages of {arguments.books} books, {arguments.retrieved} passages each; "
        f"the passage with the answer is among them in {sum(found) / len(found):.2%}"
    )
    rows = [[texts[i] for i in row] for row in retrieved]
    file = arguments.json
    done = json.loads(file.read_text()) if file is not None and file.exists() else []
    outcomes = [Outcome(**one) for one in done]
    with local_server("demo", "--log-level", "warning") as url:
        for shift in (0, None, *arguments.max_shift):
            if _name(shift) in [one.order for one in outcomes]:
                continue
            began = time.monotonic()
            outcomes.append(_run(url, asked, rows, shift, arguments.readers))
            print(f"{outcomes[-1].order}: {time.monotonic() - began:.0f} s", flush=True)
            if file is not None:
                file.write_text(json.dumps([asdict(one) for one in outcomes]))
    print("\n".join(markdown([_row(one, outcomes[0]) for one in outcomes])))


def _name(shift: int | None) -> str:
    """Of an order."""
    limit = "" if shift is None else f", at most {shift} places"
    return "rank" if shift == 0 else f"cached first{limit}"


def _run(
    url: str, asked: list[Question], rows: list[list[str]], shift: int | None, readers: int
) -> Outcome:
    """Ask all questions, from an empty cache.

    Args:
        rows: the passages of each question, by rank.
        shift: most places that a passage may move; 0: by rank.
        readers: each asks a part of the questions.
    """
    urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST")).close()

    def read(number: int) -> Outcome:
        backend = rl.Server(url, cache_salt=f"reader {number}")
        return _one_reader(backend, asked[number::readers], rows[number::readers], shift)

    with ThreadPoolExecutor(readers) as pool:
        parts = list(pool.map(read, range(readers)))
    return Outcome(
        _name(shift),
        sum(part.prompt_tokens for part in parts),
        sum(part.computed_tokens for part in parts),
        sum(part.reordered for part in parts),
        [right for part in parts for right in part.right],
    )


def _one_reader(
    backend: rl.Server, asked: list[Question], rows: list[list[str]], shift: int | None
) -> Outcome:
    outcome = Outcome(_name(shift))
    for question, passages in zip(asked, rows, strict=True):
        state = answer.run(passages, question.text, shift, backend=backend)
        usage = state.calls()[-1].usage
        outcome.prompt_tokens += usage.prompt_tokens
        outcome.computed_tokens += usage.prompt_tokens - usage.cached_tokens
        outcome.reordered += state["order"] != sorted(state["order"])
        outcome.right.append(state["answer"].strip() == question.sentence)
    return outcome


def _row(one: Outcome, by_rank: Outcome) -> dict[str, str]:
    count = len(one.right)
    differences = [a - b for a, b in zip(one.right, by_rank.right, strict=True)]
    mean = sum(differences) / count
    error = math.sqrt(sum((each - mean) ** 2 for each in differences)) / count
    return {
        "order": one.order,
        "prompt tokens": f"{one.prompt_tokens:,}",
        "computed": f"{one.computed_tokens:,}",
        "of rank order": f"{one.computed_tokens / by_rank.computed_tokens:.2f}",
        "reordered": f"{one.reordered / count:.0%}",
        "right": f"{sum(one.right) / count:.2%}",
        "points to rank order": f"{100 * mean:+.2f} ± {196 * error:.2f}",
        "right here alone, there alone": f"{differences.count(1)}, {differences.count(-1)}",
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rag_order", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--questions", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--readers", type=int, default=4, help="each with a cache of its own (default: %(default)s)")  # fmt: skip
    parser.add_argument("--books", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--passages", type=int, default=8, help="of a book (default: %(default)s)")
    parser.add_argument("--retrieved", type=int, default=5, help="passages for a question (default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-shift", type=int, nargs="*", default=[], help="also with these limits")  # fmt: skip
    parser.add_argument(
        "--json",
        type=Path,
        help="write counts and answers to this file; orders that it has already are not run again",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
