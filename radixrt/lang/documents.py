"""Orders retrieved passages for programs that send their prompts by other clients."""

from collections.abc import Sequence

from radixrt.lang.backends.protocol import Backend, Prompt
from radixrt.lang.backends.server import backend_of, default_backend
from radixrt.lang.runtime.cached_order import cached_order
from radixrt.lang.runtime.placeholder import BACKGROUND


def order_documents(
    passages: Sequence[str],
    before: Prompt = "",
    *,
    separator: str = "\n\n",
    max_shift: int | None = None,
    backend: Backend | str | None = None,
) -> list[int]:
    """The order in which :func:`radixrt.lang.documents` would put passages: those first that the server has cached.

    Args:
        passages: the texts, the best first.
        before: the prompt before the passages, character by character: a text, or messages of which the passages continue the last.
        separator: between two passages.
        max_shift: most places that a passage may move from its rank. None: any number.
        backend: a backend, or the address of a radixrt server. None: the default backend.

    Returns:
        The indices of the passages. By rank where the backend does not tell what is cached.

    >>> order_documents(["Cats eat mice.", "Dogs bark."], backend="http://127.0.0.1:1")
    [0, 1]
    """
    chosen = default_backend() if backend is None else backend_of(backend)
    return BACKGROUND.submit(cached_order(chosen, before, passages, separator, max_shift)).result()
