"""Share of answers found within 16 retries, and how many it took, by policy.

python -m tests.constrained.measure_partings [answers per schema and mood] [policy ...]
"""

import sys
from collections.abc import Callable

from radixrt.constrained.parting import FailedSpan, Parting, part_where_it_matters
from tests.constrained.checked_decoding import (
    CASES,
    Mood,
    Outcome,
    decode,
    part_at_the_beginning,
    part_at_the_end,
    part_ever_earlier,
    seeds,
)

MOODS: list[Mood] = ["stubborn", "greedy", "sampled", "sampled anew"]
POLICIES: dict[str, tuple[Callable[[FailedSpan], Parting | None], bool]] = {
    "end": (part_at_the_end, False),
    "beginning": (part_at_the_beginning, False),
    "ever earlier": (part_ever_earlier, False),
    "ever earlier, any spelling": (part_ever_earlier, True),
    "where it matters, as spelled": (part_where_it_matters, False),
    "where it matters": (part_where_it_matters, True),
}


def summary(outcomes: list[Outcome]) -> str:
    found = [o for o in outcomes if o.text is not None and not o.cut_off and o.retries <= 16]
    tried = [o.retries for o in found if o.retries]
    mean = sum(tried) / len(tried) if tried else 0.0
    return f"{100 * len(found) / len(outcomes):5.1f} % {mean:5.1f}"


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    policies = sys.argv[2:] or list(POLICIES)
    by_mood: dict[str, list[Outcome]] = {}
    for name in policies:
        part, any_spelling = POLICIES[name]
        everything: list[Outcome] = []
        for case in CASES:
            row = []
            for mood in MOODS:
                outcomes = [
                    decode(case, mood, seed, part=part, any_spelling=any_spelling, max_retries=16)
                    for seed in seeds(count)
                ]
                by_mood.setdefault(f"{name} / {mood}", []).extend(outcomes)
                everything += outcomes
                row.append(summary(outcomes))
            print(f"{name:30} {case.name:35}", " | ".join(row), flush=True)
        failing = [o for o in everything if o.retries]
        print(
            f"{name}: {summary(everything)}; of those that failed at first: {summary(failing)}; "
            f"{sum(o.num_decoded for o in everything)} tokens; cut off {sum(o.cut_off for o in everything)}\n"
        )
    for key, outcomes in by_mood.items():
        print(f"{key:45} {summary([o for o in outcomes if o.retries])}")


if __name__ == "__main__":
    main()
