"""ReAct agents: each reasons from its handbook, calls tools, reads what they return, and goes on
until it can answer.

    python examples/lang/react_agent.py

Functions are tools as they are. While a tool runs, the cache knows for how long the agent rests.
"""

from made_up import ANSWER_FROM, TOOL_S, errands, get_captain, get_home, last_word

import radixrt.lang as rl


@rl.function(temperature=0, max_tokens=64)
def agent(s: rl.State, handbook: str, customer: str) -> str:
    s += rl.system(ANSWER_FROM + handbook)
    ship = ask(s, f"What is the ship of {customer}?")
    captain = ask(s, f"Please call get_captain with ship {ship}.")
    return ask(s, f"Please call get_home with captain {captain}.")


def ask(s: rl.State, question: str) -> str:
    s += rl.user(question)
    while True:
        with s.waiting(TOOL_S):
            s += rl.assistant(rl.gen("step", tools=[get_captain, get_home]))
        if not s["step"].calls:
            return last_word(s["step"].text)
        for call in s["step"].calls:
            s += rl.tool(call, call.run())


def main() -> None:
    tasks = errands()
    inputs = [{"handbook": task.handbook, "customer": task.customer} for task in tasks]
    states = agent.run_batch(inputs, max_concurrency=16)
    for task, state in list(zip(tasks, states))[:6]:
        print(f"The captain of {task.customer}'s ship lives in {state.result}.")
    right = sum(state.result == task.home for task, state in zip(tasks, states))
    print(f"{right} of {len(tasks)} right")


if __name__ == "__main__":
    main()
