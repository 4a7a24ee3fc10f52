"""The answers of rag.py, with the openai client."""

import asyncio

from connection import MODEL, connect
from made_up import ANSWER_FROM, best_documents, last_word, library


async def main() -> None:
    documents, questions = library()
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def answer(question: str) -> str:
            found = best_documents(question, documents)
            async with room:
                response = await client.chat.completions.create(
                    model=MODEL,
                    messages=[
                        {"role": "system", "content": ANSWER_FROM + "\n\n".join(found)},
                        {"role": "user", "content": question},
                    ],
                    temperature=0,
                    max_tokens=24,
                )
            return response.choices[0].message.content

        answers = await asyncio.gather(*[answer(asked.question) for asked in questions])
    right = sum(last_word(text) == asked.answer for text, asked in zip(answers, questions))
    for text, asked in list(zip(answers, questions))[::5]:
        print(f"{asked.question:34} {text}")
    print(f"{right} of {len(questions)} right")


if __name__ == "__main__":
    asyncio.run(main())
