"""Classifies many short texts concurrently, with one shared few-shot prompt.

    python examples/batch_classification.py [--base-url http://127.0.0.1:30000/v1] [--concurrency
    16]

Requests that arrive together also share the prompt. The server inserts the prompt into the radix
tree when it plans the prefill, so the other requests use the KV of the first one.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter

from openai import APIConnectionError, AsyncOpenAI

LABELS = ("password", "invoice", "delivery", "refund")
ASK = "Choose one label for the text.\nLabels: {labels}\nText: {text}"
SHOTS = (
    ("Velta asked for the refund again.", "refund"),
    ("The password of Brado is broken.", "password"),
    ("Shunel is happy with the delivery.", "delivery"),
    ("Karimo has a question about the invoice.", "invoice"),
)
TEMPLATES = (
    "{name} wrote to us about the {topic}.",
    "{name} has a question about the {topic}.",
    "The {topic} of {name} is broken.",
    "{name} is happy with the {topic}.",
    "Yesterday {name} asked for the {topic} again.",
)
NAMES = ("Plosta", "Fenoka", "Thavus", "Grelin", "Zorata", "Quenil", "Lumek", "Stovan")


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": ASK.format(labels=", ".join(LABELS), text=text)}


def shared_prompt() -> list[dict[str, str]]:
    """The few-shot examples as turns of a chat."""
    messages = []
    for text, label in SHOTS:
        messages += [ask(text), {"role": "assistant", "content": label}]
    return messages


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    client = AsyncOpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = (await client.models.list()).data[0].id
    shots = shared_prompt()
    gate = asyncio.Semaphore(arguments.concurrency)

    async def classify(text: str) -> tuple[str, int, int]:
        """Return the label, the cached prompt tokens and all prompt tokens."""
        async with gate:
            response = await client.chat.completions.create(
                model=model, messages=[*shots, ask(text)], temperature=0, max_tokens=8
            )
        usage = response.usage
        details = usage.prompt_tokens_details
        answer = (response.choices[0].message.content or "").strip()
        return answer, (details.cached_tokens if details else 0), usage.prompt_tokens

    topics = [(t, label) for t in TEMPLATES for label in LABELS for _ in range(2)]
    texts = [
        t.format(name=NAMES[i % len(NAMES)], topic=label) for i, (t, label) in enumerate(topics)
    ]
    start = time.perf_counter()
    results = await asyncio.gather(*map(classify, texts))
    seconds = time.perf_counter() - start

    for text, (answer, cached, total) in list(zip(texts, results, strict=True))[::5]:
        print(f"{cached:4} of {total} cached  {text} → {answer!r}")
    right = sum(answer == label for (answer, *_), (_, label) in zip(results, topics, strict=True))
    cached, total = sum(r[1] for r in results), sum(r[2] for r in results)
    print(
        f"\n{len(texts)} texts in {seconds:.2f} s, {right} labelled as meant; {cached / total:.0%} of prompt tokens cached"
    )
    print("labels:", dict(Counter(answer for answer, *_ in results).most_common(6)))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except APIConnectionError:
        sys.exit(
            "No server answers there. Start one with `make serve`, or name another with --base-url."
        )
