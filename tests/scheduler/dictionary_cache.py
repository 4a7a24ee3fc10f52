"""A prefix cache one can see to be right: the oracle of the radix tree's tests."""

Prefix = tuple[str, tuple[int, ...]]


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

    def prefixes(self, salt: str, tokens: tuple[int, ...]) -> list[Prefix]:
        size = self.page_size
        return [(salt, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def match(self, salt: str, tokens: tuple[int, ...]) -> list[int]:
        found = []
        for prefix in self.prefixes(salt, tokens):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        return found

    def use(self, salt: str, tokens: tuple[int, ...]) -> None:
        self.clock += 1
        for prefix in self.prefixes(salt, tokens):
            if prefix in self.pages:
                self.used[prefix] = self.clock

    def insert(self, salt: str, tokens: tuple[int, ...], pages: list[int]) -> None:
        for prefix, page in zip(self.prefixes(salt, tokens), pages, strict=True):
            self.pages.setdefault(prefix, page)
        self.use(salt, tokens)

    def evict(self, count: int) -> list[int]:
        """The last page of the branch that was used longest ago, again and again."""
        freed = []
        locked = self.locked()
        while len(freed) < count:
            parents = self.parents()
            leaves = [p for p in self.pages if p not in parents and p not in locked]
            if not leaves:
                break
            freed.append(self.pages.pop(min(leaves, key=self.used.__getitem__)))
        return freed

    def prune(self, salt: str, tokens: tuple[int, ...]) -> list[int]:
        """A prefix, from its end up to where somebody else needs it."""
        freed, parents, locked = [], self.parents(), self.locked()
        for prefix in reversed(self.prefixes(salt, tokens)):
            if prefix in parents or prefix in locked:
                break
            freed.append(self.pages.pop(prefix))
            parents = self.parents()
        return freed

    def parents(self) -> set[Prefix]:
        """Prefixes that another one continues."""
        return {(salt, tokens[: -self.page_size]) for salt, tokens in self.pages}

    def locked(self) -> set[Prefix]:
        """Prefixes that a lock holds."""
        return {prefix for lock in self.locks for prefix in self.prefixes(*lock)}
