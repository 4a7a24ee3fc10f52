"""Asks many questions about one document; the server computes the document once.

    python examples/rag_shared_document.py [--base-url http://127.0.0.1:30000/v1]

The program works with any OpenAI-compatible server: it sends the document with every question. The
first request computes the document. From the second request on, the document's KV is in the radix
tree, and only the question is computed.
"""

import argparse
import sys
import time

from openai import APIConnectionError, OpenAI

FIELDS = ("captain", "berth", "cargo")
SHIPS = """
Velta   Moren   217   tin
Brado   Kisula  58    wool
Shunel  Tavor   3140  salt
Karimo  Jelan   96    copper
Plosta  Drenu   402   barley
Fenoka  Sorim   75    glass
Thavus  Wilano  1186  paper
Grelin  Bosek   333   timber
Zorata  Nuhal   64    honey
Stovan  Trisel  87    cider
""".strip().splitlines()
QUESTIONS = (
    "What is the captain of Karimo?",
    "What is Thavus's cargo?",
    "Tell me the berth of Zorata.",
    "Which cargo does Stovan have?",
    "What is the captain of Brado?",
    "What is Plosta's berth?",
    "What is the captain of Grelin?",
    "Tell me the cargo of Fenoka.",
)


def harbor_book() -> str:
    """The document: one paragraph per ship."""
    paragraphs = []
    for line in SHIPS:
        ship, *values = line.split()
        facts = zip(FIELDS, values, strict=True)
        paragraphs.append(" ".join(f"The {name} of {ship} is {value}." for name, value in facts))
    return "\n".join(paragraphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = client.models.list().data[0].id
    document = harbor_book()

    print(f"{'prompt':>6} {'cached':>6} {'share':>6} {'seconds':>8}  question and answer")
    for question in QUESTIONS:
        start = time.perf_counter()
        response = client.chat.completions.create(
            model=model,
            messages=[
                {
                    "role": "system",
                    "content": f"Answer the questions from the document.\n\n{document}",
                },
                {"role": "user", "content": question},
            ],
            temperature=0,
            max_tokens=32,
        )
        seconds = time.perf_counter() - start
        usage = response.usage
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        share = cached / usage.prompt_tokens
        answer = (response.choices[0].message.content or "").strip()
        print(
            f"{usage.prompt_tokens:6} {cached:6} {share:6.0%} {seconds:8.3f}  {question} → {answer!r}"
        )


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(
            "No server answers there. Start one with `make serve`, or name another with --base-url."
        )
