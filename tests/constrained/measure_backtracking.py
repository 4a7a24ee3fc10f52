"""How many answers that fail at first are found, by policy: the table of
docs/internals/checked_spans.md.

python -m tests.constrained.measure_backtracking [answers per schema and mood] [policy ...] [--each]
"""

import sys
from collections.abc import Callable

from radixrt.tokenizer.retry.backtracking import BacktrackPoint, FailedSpan, choose_backtrack_point
from tests.constrained.checked_decoding import (
    CASES,
    Mood,
    Outcome,
    decode,
    point_at_the_beginning,
    point_at_the_end,
    point_ever_earlier,
    seeds,
)

MOODS: list[Mood] = ["stubborn", "greedy", "sampled", "sampled anew"]
POLICIES: dict[str, tuple[Callable[[FailedSpan], BacktrackPoint | None], bool]] = {
    "end": (point_at_the_end, False),
    "beginning": (point_at_the_beginning, False),
    "ever earlier": (point_ever_earlier, False),
    "ever earlier, any spelling": (point_ever_earlier, True),
    "where it matters, as spelled": (choose_backtrack_point, False),
    "where it matters": (choose_backtrack_point, True),
}


def summary(outcomes: list[Outcome]) -> str:
    """Of those that failed at first: the share found within 16 retries, and the mean number of
    retries these took."""
    tried = [o for o in outcomes if o.retries]
    found = [o.retries for o in tried if o.text is not None and not o.cut_off]
    mean = sum(found) / len(found) if found else float("nan")
    return f"{100 * len(found) / len(tried):.0f} % ({mean:.1f})" if tried else "none failed"


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--each"]
    count = int(arguments[0]) if arguments else 20
    table: dict[str, dict[str, list[Outcome]]] = {}
    for name in arguments[1:] or POLICIES:
        choose_point, any_spelling = POLICIES[name]
        columns = table.setdefault(name, {})
        for case in CASES:
            for mood in MOODS:
                outcomes = [
                    decode(
                        case,
                        mood,
                        seed,
                        choose_point=choose_point,
                        any_spelling=any_spelling,
                        max_retries=16,
                    )
                    for seed in seeds(count)
                ]
                group = case.name if "--each" in sys.argv else case.name.split(":")[0].split()[0]
                for column in (group, mood, "all"):
                    columns.setdefault(column, []).extend(outcomes)
    for column in next(iter(table.values())):
        cells = [summary(table[name][column]) for name in table]
        print(f"| {column} | {' | '.join(cells)} |", flush=True)
    for name, columns in table.items():
        tokens = sum(outcome.num_decoded for outcome in columns["all"])
        print(f"{name}: {tokens / len(columns['all']):.0f} tokens decoded an answer")


if __name__ == "__main__":
    main()
