"""The tree of thought of tree_of_thought.py, with the openai client."""

import asyncio
from dataclasses import dataclass

from connection import MODEL, connect
from made_up import ANSWER_FROM, ROADS, Map, last_word, majority, maps

DEPTH, WIDTH, VOTES = 2, 2, 3


@dataclass
class Branch:
    messages: list[dict]
    path: list[str]
    worth: int = 0


async def main() -> None:
    explored = maps()
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def ask(
            messages: list[dict], question: str, **sampling
        ) -> tuple[list[dict], list[str]]:
            messages = [*messages, {"role": "user", "content": question}]
            async with room:
                response = await client.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=24, **sampling
                )
            answers = [choice.message.content for choice in response.choices]
            return [*messages, {"role": "assistant", "content": answers[0]}], answers

        async def grow(branch: Branch, road: str) -> Branch:
            question = f"What is the {road} of {branch.path[-1]}?"
            messages, (step,) = await ask(branch.messages, question, temperature=0)
            place = last_word(step)
            question = f"What is the treasure of {place}?"
            messages, votes = await ask(messages, question, temperature=0.6, n=VOTES, seed=0)
            treasure = majority([last_word(vote) for vote in votes])
            worth = int(treasure) if treasure.isdecimal() else 0
            return Branch(messages, [*branch.path, place], worth)

        async def search(map: Map) -> list[str]:
            messages = [{"role": "system", "content": ANSWER_FROM + map.text}]
            best = [Branch(messages, [map.start])]
            for _ in range(DEPTH):
                grown = [grow(branch, road) for branch in best for road in ROADS]
                branches = await asyncio.gather(*grown)
                best = sorted(branches, key=lambda branch: branch.worth, reverse=True)[:WIDTH]
            return best[0].path

        paths = await asyncio.gather(*[search(map) for map in explored])
    found = [map.treasures.get(path[-1], 0) for map, path in zip(explored, paths)]
    for path, treasure in zip(paths, found):
        print(f"{' → '.join(path)}: {treasure}")
    right = sum(t == map.best_treasure(DEPTH, WIDTH) for map, t in zip(explored, found))
    print(f"{right} of {len(found)} found the best")


if __name__ == "__main__":
    asyncio.run(main())
