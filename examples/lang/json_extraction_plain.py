"""The records of json_extraction.py, with the openai client."""

import asyncio

from connection import MODEL, connect
from made_up import ship_records
from pydantic import BaseModel


class Ship(BaseModel):
    name: str
    captain: str
    fee: int
    home: str


async def main() -> None:
    records = [(text, Ship(**values)) for text, values in ship_records()]
    room = asyncio.Semaphore(16)
    async with connect() as client:

        async def extract(text: str, name: str) -> Ship:
            question = f"{text} Extract name, captain, fee, home of {name} as JSON."
            async with room:
                response = await client.chat.completions.parse(
                    model=MODEL,
                    messages=[{"role": "user", "content": question}],
                    response_format=Ship,
                    temperature=0,
                    max_tokens=80,
                )
            return response.choices[0].message.parsed

        ships = await asyncio.gather(*[extract(text, ship.name) for text, ship in records])
    for ship in ships[:4]:
        print(repr(ship))
    right = sum(found == ship for found, (_, ship) in zip(ships, records))
    print(f"{right} of {len(ships)} right; all fees together: {sum(ship.fee for ship in ships)}")


if __name__ == "__main__":
    asyncio.run(main())
