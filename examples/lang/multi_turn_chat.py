"""Chats of six turns, several at once; each turn is about what was said before.

    python examples/lang/multi_turn_chat.py

The program appends a question and an answer, and another; each turn begins as soon as the one
before it is answered.
"""

from made_up import ANSWER_FROM, Asked, chats, last_word

import radixrt.lang as rl


@rl.function(temperature=0, max_tokens=24)
def chat(s: rl.State, text: str, turns: list[Asked]) -> None:
    s += rl.system(ANSWER_FROM + text)
    for turn in turns:
        s += rl.user(turn.question) + rl.assistant(rl.gen())


def main() -> None:
    inputs = [{"text": text, "turns": turns} for text, turns in chats()]
    states = chat.run_batch(inputs, max_concurrency=16)
    for message in states[0].messages()[1:]:
        print(f"{message['role']:9}  {message['content']}")
    answers = [m["content"] for s in states for m in s.messages() if m["role"] == "assistant"]
    truths = [turn.answer for chat in inputs for turn in chat["turns"]]
    right = sum(last_word(answer) == truth for answer, truth in zip(answers, truths))
    print(f"{right} of {len(truths)} right")


if __name__ == "__main__":
    main()
