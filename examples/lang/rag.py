"""Retrieval-augmented answers: many questions about many documents, the best two before each
question.

    python examples/lang/rag.py

Readers ask in no order. ``run_batch`` sends questions about the same documents one after another.
"""

from made_up import ANSWER_FROM, best_documents, last_word, library

import radixrt.lang as rl


@rl.function(temperature=0, max_tokens=24)
def answer(s: rl.State, documents: list[str], question: str) -> None:
    s += rl.system(ANSWER_FROM + "\n\n".join(documents))
    s += rl.user(question) + rl.assistant(rl.gen("answer"))


def main() -> None:
    documents, questions = library()
    inputs = [
        {"documents": best_documents(asked.question, documents), "question": asked.question}
        for asked in questions
    ]
    answers = [state["answer"] for state in answer.run_batch(inputs, max_concurrency=16)]
    right = sum(last_word(text) == asked.answer for text, asked in zip(answers, questions))
    for text, asked in list(zip(answers, questions))[::5]:
        print(f"{asked.question:34} {text}")
    print(f"{right} of {len(questions)} right")


if __name__ == "__main__":
    main()
