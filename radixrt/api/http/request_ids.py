"""What is a request called? What the client has chosen, or a name that nobody can guess."""

import uuid

from radixrt.base.errors import RequestError

LONGEST_REQUEST_ID = 256


def request_id(prefix: str, *chosen: str | None) -> str:
    """The id that the client chose, under the first of the names that it may have, or a new one.

    Raises:
        RequestError: it can't stand in a header.
    """
    given = next((name for name in chosen if name is not None), None)
    if given is None:
        return new_id(prefix)
    if not (0 < len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable()):
        raise RequestError(
            f"rid must have 1 to {LONGEST_REQUEST_ID} printable ASCII characters.", param="rid"
        )
    return given


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
