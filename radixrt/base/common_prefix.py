"""How long is the beginning that two texts have in common?"""


def common_prefix_length(one: str, other: str) -> int:
    """In characters; by bisection, since slices compare fast and texts may have megabytes."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
