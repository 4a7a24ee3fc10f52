"""A tree of thought that searches the way to a treasure: branch, vote on each branch, continue from
the best two.

    python examples/lang/tree_of_thought.py

A branch is a fork: it has the map and all steps before it in common with its siblings.
"""

from made_up import ANSWER_FROM, ROADS, Map, last_word, majority, maps

import radixrt.lang as rl

DEPTH, WIDTH, VOTES = 2, 2, 3


@rl.function(temperature=0, max_tokens=24)
def search(s: rl.State, map: Map) -> list[str]:
    s += rl.system(ANSWER_FROM + map.text)
    s["path"], best = [map.start], [s]
    for _ in range(DEPTH):
        branches = [branch for state in best for branch in grow(state)]
        for branch in branches:
            branch["path"] = [*branch["path"], last_word(branch["step"])]
            branch += rl.user(f"What is the treasure of {branch['path'][-1]}?")
            branch += rl.assistant(rl.gen("votes", n=VOTES, temperature=0.6, seed=0))
        best = sorted(branches, key=worth, reverse=True)[:WIDTH]
    return best[0]["path"]


def grow(state: rl.State) -> rl.Forks:
    forks = state.fork(len(ROADS))
    for fork, road in zip(forks, ROADS):
        fork += rl.user(f"What is the {road} of {state['path'][-1]}?")
        fork += rl.assistant(rl.gen("step"))
    return forks


def worth(branch: rl.State) -> int:
    treasure = majority([last_word(vote) for vote in branch["votes"]])
    return int(treasure) if treasure.isdecimal() else 0


def main() -> None:
    explored = maps()
    states = search.run_batch([{"map": map} for map in explored], max_concurrency=16)
    found = [map.treasures.get(state.result[-1], 0) for map, state in zip(explored, states)]
    for state, treasure in zip(states, found):
        print(f"{' → '.join(state.result)}: {treasure}")
    right = sum(t == map.best_treasure(DEPTH, WIDTH) for map, t in zip(explored, found))
    print(f"{right} of {len(found)} found the best")


if __name__ == "__main__":
    main()
