"""The votes of self_consistency.py, with the openai client."""

import asyncio

from connection import MODEL, connect
from made_up import ANSWER_FROM, hard_questions, last_word, majority


async def main() -> None:
    questions = hard_questions()
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def vote(text: str, question: str) -> list[str]:
            async with room:
                response = await client.chat.completions.create(
                    model=MODEL,
                    messages=[
                        {"role": "system", "content": ANSWER_FROM + text},
                        {"role": "user", "content": question},
                    ],
                    temperature=1.8,
                    max_tokens=24,
                    n=6,
                    seed=0,
                )
            return [last_word(choice.message.content) for choice in response.choices]

        results = await asyncio.gather(*[vote(text, asked.question) for text, asked in questions])
    single = agreed = 0
    for (_, asked), votes in zip(questions, results):
        single += votes[0] == asked.answer
        agreed += majority(votes) == asked.answer
        print(f"{asked.question:34} {majority(votes):8} {votes.count(majority(votes))} of 6 agree")
    print(f"first answers: {single} of {len(questions)} right")
    print(f"majorities: {agreed} of {len(questions)} right")


if __name__ == "__main__":
    asyncio.run(main())
