"""A prefix cache one can see to be right: the oracle of the radix tree's tests."""

from radixrt.messages.cache_root import CacheRoot

Prefix = tuple[CacheRoot, tuple[int, ...]]


class DictionaryCache:
    """What a prefix cache is: a page for each prefix whose length is a multiple of the page size.

    A prefix was last used when anything that begins with it was last used.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.clock = 0
        self.locks: list[Prefix] = []
        self.max_pages: dict[str, int] = {}
        """Shares of namespaces, each the tenant of a root."""

    def prefixes(self, root: CacheRoot, tokens: tuple[int, ...]) -> list[Prefix]:
        size = self.page_size
        return [(root, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def match(self, root: CacheRoot, tokens: tuple[int, ...]) -> list[int]:
        found = []
        for prefix in self.prefixes(root, tokens):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        return found

    def use(self, root: CacheRoot, tokens: tuple[int, ...]) -> None:
        self.clock += 1
        for prefix in self.prefixes(root, tokens):
            if prefix in self.pages:
                self.used[prefix] = self.clock

    def insert(self, root: CacheRoot, tokens: tuple[int, ...], pages: list[int]) -> None:
        for prefix, page in zip(self.prefixes(root, tokens), pages, strict=True):
            self.pages.setdefault(prefix, page)
        self.use(root, tokens)

    def evict(self, count: int) -> list[int]:
        """The last page of the branch that was used longest ago, again and again; first, of the
        namespace that is furthest above its share, until it is no longer."""
        freed = []
        while len(freed) < count and self.leaves():
            namespace = self.furthest_above()
            excess = count if namespace is None else self.excess(namespace)
            for _ in range(min(excess, count - len(freed))):
                if not (leaves := self.leaves(namespace)):
                    break
                freed.append(self.pages.pop(min(leaves, key=self.used.__getitem__)))
        return freed

    def leaves(self, namespace: str | None = None) -> list[Prefix]:
        """Prefixes that may be evicted, in a namespace or in all."""
        kept = self.parents() | self.locked()
        return [p for p in self.pages if p not in kept and namespace in (None, p[0].tenant)]

    def excess(self, namespace: str) -> int:
        """Pages of a namespace above its share."""
        own = sum(root.tenant == namespace for root, _ in self.pages)
        return max(0, own - self.max_pages[namespace])

    def furthest_above(self) -> str | None:
        """Of the namespaces above their shares from which a page can be evicted, the one with the
        most pages for its share."""
        above = {
            name: (self.excess(name) + share) / max(share, 1)
            for name, share in self.max_pages.items()
            if self.excess(name) and self.leaves(name)
        }
        return min(above, key=lambda name: (-above[name], name), default=None)

    def prune(self, root: CacheRoot, tokens: tuple[int, ...]) -> list[int]:
        """A prefix, from its end up to where somebody else needs it."""
        freed, parents, locked = [], self.parents(), self.locked()
        for prefix in reversed(self.prefixes(root, tokens)):
            if prefix in parents or prefix in locked:
                break
            freed.append(self.pages.pop(prefix))
            parents = self.parents()
        return freed

    def parents(self) -> set[Prefix]:
        """Prefixes that another one continues."""
        return {(root, tokens[: -self.page_size]) for root, tokens in self.pages}

    def locked(self) -> set[Prefix]:
        """Prefixes that a lock holds."""
        return {prefix for lock in self.locks for prefix in self.prefixes(*lock)}
