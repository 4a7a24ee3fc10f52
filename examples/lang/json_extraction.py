"""Records from a batch of texts, as values of a type.

python examples/lang/json_extraction.py
"""

from dataclasses import dataclass

from made_up import ship_records

import radixrt.lang as rl


@dataclass
class Ship:
    name: str
    captain: str
    fee: int
    home: str


@rl.function(temperature=0, max_tokens=80)
def extract(s: rl.State, text: str, name: str) -> None:
    s += rl.user(f"{text} Extract name, captain, fee, home of {name} as JSON.")
    s += rl.assistant(rl.gen("ship", schema=Ship))


def main() -> None:
    records = [(text, Ship(**values)) for text, values in ship_records()]
    inputs = [{"text": text, "name": ship.name} for text, ship in records]
    ships = [state["ship"] for state in extract.run_batch(inputs, max_concurrency=16)]
    for ship in ships[:4]:
        print(ship)
    right = sum(found == ship for found, (_, ship) in zip(ships, records))
    print(f"{right} of {len(ships)} right; all fees together: {sum(ship.fee for ship in ships)}")


if __name__ == "__main__":
    main()
