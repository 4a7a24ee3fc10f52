"""The few-shot benchmark of few_shot.py, with the openai client."""

import asyncio
from collections import Counter

from connection import MODEL, connect
from made_up import Question, benchmark


async def main() -> None:
    questions = benchmark()
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def classify(question: Question) -> str:
            messages = []
            for example, label in question.subject.examples:
                messages.append({"role": "user", "content": question.subject.ask(example)})
                messages.append({"role": "assistant", "content": label})
            messages.append({"role": "user", "content": question.subject.ask(question.text)})
            async with room:
                response = await client.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    temperature=0,
                    extra_body={"guided_choice": question.subject.labels},
                )
            return response.choices[0].message.content

        labels = await asyncio.gather(*map(classify, questions))
    asked = Counter(question.subject.name for question in questions)
    right = Counter(q.subject.name for q, label in zip(questions, labels) if label == q.label)
    for subject in sorted(asked):
        print(f"{subject:8} {right[subject]:3} of {asked[subject]}")
    print(f"{right.total()} of {len(questions)} right")


if __name__ == "__main__":
    asyncio.run(main())
