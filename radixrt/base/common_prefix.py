"""The length of the common prefix of two texts."""


def common_prefix_length(one: str, other: str) -> int:
    """Length in characters, by bisection: comparing slices is fast, and texts may have megabytes.

    >>> common_prefix_length("prefill", "prefix")
    5
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
