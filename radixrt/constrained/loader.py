"""Temporary."""


class GrammarError(Exception):
    pass


def fill_masks(matchers, bits, rows):
    return []


class GrammarLoader:
    def __init__(self, *a):
        pass

    def load(self, grammar):
        raise GrammarError("no")
