"""Runs an agent that waits for a tool while other requests fill the cache, without and with cache
hints.

    radixrt serve --max-total-tokens 8192    # a small cache
    python examples/cache_hints.py [--base-url http://127.0.0.1:30000/v1]

Without a hint, the agent's conversation is the least recently used prefix when its tool returns. It
was evicted and is computed again. With the field `cache` in the request, the server knows that the
agent will continue.
"""

import argparse
import sys

from openai import APIConnectionError, OpenAI

CREW = """
Brevik  Ostra   31
Calmin  Dovet   47
Ensho   Pralin  29
Fabrel  Quasim  52
Gorath  Rindel  38
Hevlan  Sorbet  44
""".strip().splitlines()
MAX_TOKENS = 50_000
"""Largest cache that the example fills, in tokens; one request has some 200."""

QUESTION = "Which ship is Ensho on? Look up where it lies."
TOOL_SAYS = "The berth of Pralin is 58. What is the berth of Pralin?"


def crew_list(number: int) -> str:
    """A different document for each number."""
    rows = [line.split() for line in CREW]
    facts = [
        f"The ship of {name} is {ship}. The age of {name} is {age}." for name, ship, age in rows
    ]
    return f"List {number}.\n" + "\n".join(facts)


class Server:
    """Requests of this example."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.client = OpenAI(base_url=base_url, api_key=api_key)
        self.model = self.client.models.list().data[0].id

    def ask(self, messages: list[dict[str, str]], cache: dict | None = None):
        return self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            temperature=0,
            max_tokens=24,
            extra_body={"cache": cache} if cache else None,
        )

    def cache_tokens(self) -> int:
        """The size of the cache in tokens."""
        return self.client.get("/cache/stats", cast_to=dict)["tokens"]["total"]

    def release(self, session: str) -> int:
        reply = self.client.post("/cache/release", body={"session": session}, cast_to=dict)
        return reply["released_tokens"]


def agent(server: Server, number: int, hint: dict | None) -> tuple[int, int]:
    """Run two turns with a tool call between them. Return the cached and all prompt tokens of the
    second turn."""
    messages = [
        {"role": "system", "content": crew_list(number)},
        {"role": "user", "content": QUESTION},
    ]
    first = server.ask(messages, hint)
    fill(server, 1000 * number)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or "One moment."},
        {"role": "user", "content": TOOL_SAYS},
    ]
    second = server.ask(messages, hint)
    return second.usage.prompt_tokens_details.cached_tokens, second.usage.prompt_tokens


def fill(server: Server, first_number: int) -> None:
    """Send new prompts while the tool runs, with as many tokens as the cache holds."""
    left, number = server.cache_tokens(), first_number
    while left > 0:
        number += 1
        message = {"role": "user", "content": crew_list(number)}
        left -= server.ask([message]).usage.total_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none")
    arguments = parser.parse_args()
    server = Server(arguments.base_url, arguments.api_key)
    if server.cache_tokens() > MAX_TOKENS:
        sys.exit(
            f"This server's cache holds {server.cache_tokens()} tokens, too many to fill. "
            "Start one with `radixrt serve --max-total-tokens 8192`, or name another with --base-url."
        )
    print(f"The cache holds {server.cache_tokens()} tokens; others fill it while the tool runs.")

    hint = {"retain": "high", "ttl_s": 120, "next_use_s": 10, "session": "agent-2"}
    for number, name, cache in ((1, "without hints", None), (2, "with hints", hint)):
        cached, prompt = agent(server, number, cache)
        print(f"{name:>14}: {cached} of the next turn's {prompt} prompt tokens come from the cache")
    print(f"The agent is done: {server.release('agent-2')} tokens are free to go.")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(
            "No server answers there. Start one with `radixrt serve`, or name another with --base-url."
        )
