"""The chats of multi_turn_chat.py, with the openai client."""

import asyncio

from connection import MODEL, connect
from made_up import ANSWER_FROM, Asked, chats, last_word


async def main() -> None:
    inputs = chats()
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def chat(text: str, turns: list[Asked]) -> list[dict[str, str]]:
            messages = [{"role": "system", "content": ANSWER_FROM + text}]
            for turn in turns:
                messages.append({"role": "user", "content": turn.question})
                async with room:
                    response = await client.chat.completions.create(
                        model=MODEL, messages=messages, temperature=0, max_tokens=24
                    )
                answer = response.choices[0].message.content
                messages.append({"role": "assistant", "content": answer})
            return messages

        conversations = await asyncio.gather(*[chat(text, turns) for text, turns in inputs])
    for message in conversations[0][1:]:
        print(f"{message['role']:9}  {message['content']}")
    answers = [m["content"] for c in conversations for m in c if m["role"] == "assistant"]
    truths = [turn.answer for _, turns in inputs for turn in turns]
    right = sum(last_word(answer) == truth for answer, truth in zip(answers, truths))
    print(f"{right} of {len(truths)} right")


if __name__ == "__main__":
    asyncio.run(main())
