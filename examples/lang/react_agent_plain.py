"""The agents of react_agent.py, with the openai client."""

import asyncio
import json

from connection import MODEL, connect
from made_up import ANSWER_FROM, Errand, errands, get_captain, get_home, last_word

FUNCTIONS = {"get_captain": get_captain, "get_home": get_home}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": FUNCTIONS[name].__doc__,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
                "additionalProperties": False,
            },
        },
    }
    for name, parameter in (("get_captain", "ship"), ("get_home", "captain"))
]


async def main() -> None:
    tasks = errands()
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def ask(messages: list[dict], question: str) -> str:
            messages.append({"role": "user", "content": question})
            while True:
                async with room:
                    response = await client.chat.completions.create(
                        model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=64
                    )
                message = response.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return last_word(message.content)
                for call in message.tool_calls:
                    arguments = json.loads(call.function.arguments)
                    result = await asyncio.to_thread(FUNCTIONS[call.function.name], **arguments)
                    content = json.dumps(result)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

        async def agent(task: Errand) -> str:
            messages = [{"role": "system", "content": ANSWER_FROM + task.handbook}]
            ship = await ask(messages, f"What is the ship of {task.customer}?")
            captain = await ask(messages, f"Please call get_captain with ship {ship}.")
            return await ask(messages, f"Please call get_home with captain {captain}.")

        homes = await asyncio.gather(*map(agent, tasks))
    for task, home in list(zip(tasks, homes))[:6]:
        print(f"The captain of {task.customer}'s ship lives in {home}.")
    print(f"{sum(home == task.home for task, home in zip(tasks, homes))} of {len(tasks)} right")


if __name__ == "__main__":
    asyncio.run(main())
