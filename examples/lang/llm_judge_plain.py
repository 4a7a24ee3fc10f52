"""The judge of llm_judge.py, with the openai client."""

import asyncio

from connection import MODEL, connect
from made_up import ANSWER_FROM, ASPECTS, Duel, duels


async def main() -> None:
    fought = duels()
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def truth(duel: Duel, aspect: str) -> str:
            first, second = duel.reports
            async with room:
                response = await client.chat.completions.create(
                    model=MODEL,
                    messages=[
                        {"role": "system", "content": ANSWER_FROM + duel.log},
                        {"role": "user", "content": f"What is the {aspect} of {duel.ship}?"},
                    ],
                    temperature=0,
                    extra_body={"guided_choice": sorted({first[aspect], second[aspect]})},
                )
            return response.choices[0].message.content

        async def judge(duel: Duel) -> int:
            truths = await asyncio.gather(*[truth(duel, aspect) for aspect in ASPECTS])
            points = [sum(r[a] == t for a, t in zip(ASPECTS, truths)) for r in duel.reports]
            return points.index(max(points))

        verdicts = await asyncio.gather(*map(judge, fought))
    for duel, verdict in zip(fought, verdicts):
        print(f"{duel.ship:6} report {verdict + 1} is better")
    right = sum(verdict == duel.better for duel, verdict in zip(fought, verdicts))
    print(f"{right} of {len(fought)} judged as the log says")


if __name__ == "__main__":
    asyncio.run(main())
