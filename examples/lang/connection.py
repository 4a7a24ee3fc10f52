"""Connects the programs with the openai client to the server that the language's programs use."""

import os

from openai import AsyncOpenAI

MODEL = os.environ.get("RADIXRT_MODEL", "demo")


def connect() -> AsyncOpenAI:
    url = os.environ.get("RADIXRT_URL", "http://127.0.0.1:30000")
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
