"""Unit vectors of texts: by a server of an embedding model or, without one, of the letters of their
words."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from openai import OpenAI

Vectors = NDArray[np.float32]  # [texts, numbers of a vector]
Embed = Callable[[Sequence[str]], Vectors]

BATCH = 64
"""Texts of a request."""
HASHED_SIZE = 1024
SHORTEST_WORD = 4
"""Shorter words ("the", "of") are in all texts."""


def by_server(url: str) -> Embed:
    """The vectors of ``/v1/embeddings``. Long texts are cut."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def embed(texts: Sequence[str]) -> Vectors:
        found: list[list[float]] = []
        for start in range(0, len(texts), BATCH):
            answer = client.embeddings.create(
                model=model,
                input=list(texts[start : start + BATCH]),
                extra_body={"truncate_prompt_tokens": -1},
            )
            found += [one.embedding for one in answer.data]
        return np.array(found, dtype=np.float32)

    return embed


def hashed(texts: Sequence[str]) -> Vectors:
    """Counts of words and of groups of three and four letters, by hash. Texts that share words and
    names have a high cosine."""
    vectors = np.zeros((len(texts), HASHED_SIZE), dtype=np.float32)
    for vector, text in zip(vectors, texts, strict=True):
        for word in "".join(c if c.isalnum() else " " for c in text.lower()).split():
            if len(word) >= SHORTEST_WORD:
                for part in _parts(f"<{word}>"):
                    vector[zlib.crc32(part.encode()) % HASHED_SIZE] += 1
    vectors = np.sqrt(vectors)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def _parts(word: str) -> list[str]:
    groups = [
        word[start : start + size] for size in (3, 4) for start in range(len(word) - size + 1)
    ]
    return [word, *groups]
