"""Self-consistency: sample six answers to a question, and take the one that most agree on.

    python examples/lang/self_consistency.py

``n=6`` computes the text and the question once for all six.
"""

from made_up import ANSWER_FROM, hard_questions, last_word, majority

import radixrt.lang as rl


@rl.function(temperature=1.8, seed=0, max_tokens=24)
def vote(s: rl.State, text: str, question: str) -> list[str]:
    s += rl.system(ANSWER_FROM + text) + rl.user(question)
    s += rl.assistant(rl.gen("answers", n=6))
    return [last_word(answer) for answer in s["answers"]]


def main() -> None:
    questions = hard_questions()
    inputs = [{"text": text, "question": asked.question} for text, asked in questions]
    single = agreed = 0
    for (_, asked), state in zip(questions, vote.run_batch(inputs, max_concurrency=16)):
        votes = state.result
        single += votes[0] == asked.answer
        agreed += majority(votes) == asked.answer
        print(f"{asked.question:34} {majority(votes):8} {votes.count(majority(votes))} of 6 agree")
    print(f"first answers: {single} of {len(questions)} right")
    print(f"majorities: {agreed} of {len(questions)} right")


if __name__ == "__main__":
    main()
