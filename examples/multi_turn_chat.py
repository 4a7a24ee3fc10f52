"""Streams a chat; each turn finds the earlier turns and the model's answers in the cache.

    python examples/multi_turn_chat.py [--base-url http://127.0.0.1:30000/v1]

The client sends the whole conversation with each turn, as OpenAI's API requires. The server
computes only the new tokens, because generated tokens enter the radix tree like prompt tokens.
"""

import argparse
import sys

from openai import APIConnectionError, OpenAI

TOWNS = {  # mayor, river, tower
    "Dorvel": ("Kanuta", "Smeno", "84"),
    "Prilam": ("Oshek", "Vanto", "315"),
    "Zekoru": ("Bralin", "Thame", "2060"),
    "Hulsen": ("Temira", "Ordun", "71"),
    "Wasdim": ("Folke", "Grenta", "508"),
    "Miravo": ("Sandor", "Pilsa", "1193"),
}
FACTS = "\n".join(
    f"The mayor of {town} is {mayor}. The river of {town} is {river}. The tower of {town} is {tower}."
    for town, (mayor, river, tower) in TOWNS.items()
)
TURNS = (
    "What is the mayor of Dorvel?",
    "And its river?",
    "What about Prilam?",
    "And the tower?",
    "What about Zekoru?",
    "And its mayor?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = client.models.list().data[0].id

    messages = [{"role": "system", "content": f"Answer from this text.\n\n{FACTS}"}]
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        print(f"\nuser       {question}\nassistant  ", end="")
        answer, usage = "", None
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                piece = chunk.choices[0].delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
            usage = chunk.usage or usage
        messages.append({"role": "assistant", "content": answer})
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        print(f"\n           [{cached} of {usage.prompt_tokens} prompt tokens from the cache]")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(
            "No server answers there. Start one with `make serve`, or name another with --base-url."
        )
