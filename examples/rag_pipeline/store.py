"""A vector store of passages: Qdrant in this process, in memory or in a folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from books import Passage
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams
from vectors import Embed

COLLECTION = "passages"


class Store:
    """Passages with their vectors. The same calls work with a Qdrant server:
    ``QdrantClient(url=...)``."""

    def __init__(self, client: QdrantClient, embed: Embed) -> None:
        self._client = client
        self._embed = embed

    def add(self, passages: Sequence[Passage]) -> None:
        """Store passages. A collection that is there already is kept as it is."""
        if self._client.collection_exists(COLLECTION):
            return
        vectors = self._embed([passage.text for passage in passages])
        settings = VectorParams(size=vectors.shape[1], distance=Distance.COSINE)
        self._client.create_collection(COLLECTION, vectors_config=settings)
        points = [
            PointStruct(id=i, vector=vector.tolist(), payload={"id": one.id, "text": one.text})
            for i, (one, vector) in enumerate(zip(passages, vectors, strict=True))
        ]
        self._client.upsert(COLLECTION, points)

    def nearest(self, question: str, count: int) -> list[Passage]:
        """The passages with the highest cosine, the best first."""
        (vector,) = self._embed([question])
        found = self._client.query_points(COLLECTION, query=vector.tolist(), limit=count)
        return [Passage(**point.payload) for point in found.points]


@contextmanager
def opened(embed: Embed, folder: str | None) -> Iterator[Store]:
    """A store that is closed at the end of the block. Without a folder it is in memory."""
    client = QdrantClient(path=folder) if folder else QdrantClient(":memory:")
    try:
        yield Store(client, embed)
    finally:
        client.close()
