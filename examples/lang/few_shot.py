"""A few-shot benchmark of eight subjects: twelve worked examples before each question.

    python examples/lang/few_shot.py

The questions come in random order. ``run_batch`` sends those of one subject after another, so the
examples of a subject are computed once, however small the cache is.
"""

from collections import Counter

from made_up import Subject, benchmark

import radixrt.lang as rl


@rl.function(temperature=0)
def classify(s: rl.State, subject: Subject, text: str) -> None:
    for example, label in subject.examples:
        s += rl.user(subject.ask(example)) + rl.assistant(label)
    s += rl.user(subject.ask(text)) + rl.assistant(rl.gen("label", choices=subject.labels))


def main() -> None:
    questions = benchmark()
    inputs = [{"subject": question.subject, "text": question.text} for question in questions]
    states = classify.run_batch(inputs, max_concurrency=16)
    asked = Counter(question.subject.name for question in questions)
    right = Counter(q.subject.name for q, s in zip(questions, states) if s["label"] == q.label)
    for subject in sorted(asked):
        print(f"{subject:8} {right[subject]:3} of {asked[subject]}")
    print(f"{right.total()} of {len(questions)} right")


if __name__ == "__main__":
    main()
