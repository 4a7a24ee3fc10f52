"""Answers a batch of questions without a server: the engine runs inside this program.

    python examples/offline_batch.py [--model-path DIR_OR_HUB_ID]

The prompts share a text. The engine computes the text once, although all prompts arrive at the same
time.
"""

import argparse

from radixrt import LLM, SamplingParams

TEXT = (
    "The owner of Velta is Moren. The color of Velta is green. The weight of Velta is 217. "
    "The owner of Brado is Kisula. The color of Brado is red. The weight of Brado is 58. "
    "The owner of Shunel is Tavor. The color of Shunel is white. The weight of Shunel is 3140."
)
QUESTIONS = [f"What is the {name} of {e}?" for e in ("Velta", "Brado", "Shunel") for name in ("owner", "color", "weight")]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="demo")
    arguments = parser.parse_args()
    chats = [
        [
            {"role": "system", "content": f"Answer from this text.\n\n{TEXT}"},
            {"role": "user", "content": question},
        ]
        for question in QUESTIONS
    ]
    with LLM(arguments.model_path) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=32))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(
            f"{output.cached_tokens:4} of {output.num_prompt_tokens} cached  {question} → {output.text!r}"
        )


if __name__ == "__main__":
    main()
