"""A judge of two reports: one branch for each aspect, and the better report wins most aspects.

    python examples/lang/llm_judge.py

In each branch the judge is held to say what one of the reports says.
"""

from made_up import ANSWER_FROM, ASPECTS, Duel, duels

import radixrt.lang as rl


@rl.function(temperature=0)
def judge(s: rl.State, duel: Duel) -> int:
    s += rl.system(ANSWER_FROM + duel.log)
    first, second = duel.reports
    forks = s.fork(len(ASPECTS))
    for fork, aspect in zip(forks, ASPECTS):
        fork += rl.user(f"What is the {aspect} of {duel.ship}?")
        fork += rl.assistant(rl.gen("truth", choices=sorted({first[aspect], second[aspect]})))
    truths = forks.gather("truth")
    points = [sum(report[a] == t for a, t in zip(ASPECTS, truths)) for report in duel.reports]
    return points.index(max(points))


def main() -> None:
    fought = duels()
    states = judge.run_batch([{"duel": duel} for duel in fought], max_concurrency=16)
    for duel, state in zip(fought, states):
        print(f"{duel.ship:6} report {state.result + 1} is better")
    right = sum(state.result == duel.better for duel, state in zip(fought, states))
    print(f"{right} of {len(fought)} judged as the log says")


if __name__ == "__main__":
    main()
