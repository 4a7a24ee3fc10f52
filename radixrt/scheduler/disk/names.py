"""Names the pages in memory by the prefixes that they end, so that they are found on disk."""

from collections.abc import Callable, Iterator

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import ID_BYTES, TokenIds
from radixrt.scheduler.disk.index import PageName, page_names
from radixrt.scheduler.radix.page_allocator import Pages


class NamedPages:
    """The names of the pages in the radix tree, whose observer it is.

    Hashing takes about a microsecond a page. It is done when a name is first needed, or after the
    workers have their next step (:meth:`settle`).

    Args:
        root_digest: the digest of the empty prefix of a cache root.
    """

    def __init__(
        self, num_pages: int, page_size: int, root_digest: Callable[[CacheRoot], bytes]
    ) -> None:
        self._page_bytes = ID_BYTES * page_size
        self._root_digest = root_digest
        self._names: list[PageName | None] = [None] * num_pages
        self._stored: list[tuple[CacheRoot | None, int | None, TokenIds, Pages]] = []
        """Pages that have no name yet."""
        self._in_the_making: set[int] = set()
        self.removed_last: list[tuple[int, PageName]] = []
        """The pages that left the tree last."""

    def begin_plan(self) -> None:
        """Begin a plan. What entered the tree before is computed by steps that were sent."""
        self._in_the_making.clear()

    def is_computed(self, page: int) -> bool:
        """Whether the steps that were sent compute this page. One that entered the tree in the plan
        in the making is computed later."""
        return page not in self._in_the_making

    def stored(
        self, root: CacheRoot | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        self._stored.append((root, previous_page, tokens, pages))
        self._in_the_making.update(pages.tolist())

    def removed(self, pages: Pages) -> None:
        self.settle()
        self.removed_last = []
        for page in pages.tolist():
            name = self._names[page]
            assert name is not None, "a page without a name was in the tree"
            self.removed_last.append((page, name))
            self._names[page] = None

    def settle(self) -> None:
        """Name all pages."""
        stored, self._stored = self._stored, []
        for root, previous, tokens, pages in stored:
            named = self.behind(previous, root or BASE_ROOT, tokens.tobytes())
            for page, name in zip(pages.tolist(), named, strict=True):
                self._names[page] = name

    def behind(self, page: int | None, root: CacheRoot, packed: bytes) -> Iterator[PageName]:
        """The names of the whole pages of packed tokens behind the prefix that a page ends. None:
        the empty prefix of a cache root."""
        if page is None:
            return page_names(self._root_digest(root), 0, packed, self._page_bytes)
        name = self._names[page]
        assert name is not None, "a page without a name was in the tree"
        return page_names(name.digest, name.depth + 1, packed, self._page_bytes, name.is_activated)

    def name(self, page: int) -> PageName | None:
        """The name of a page; None: it is not in the tree."""
        return self._names[page]
