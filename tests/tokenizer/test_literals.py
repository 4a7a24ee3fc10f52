"""Strings in long texts are found as a regular expression finds them."""

import re

from hypothesis import given
from hypothesis import strategies as st

from radixrt.tokenizer.prompt.breakpoints import Literals


@given(
    strings=st.lists(st.text("<ab>", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("<ab>", max_size=60),
    window=st.integers(1, 20),
)
def test_windows_change_nothing(strings: list[str], text: str, window: int) -> None:
    longest_first = sorted(strings, key=len, reverse=True)
    whole = re.finditer("|".join(map(re.escape, longest_first)), text)
    found = Literals(strings, window).finditer(text)
    assert [match.span() for match in found] == [match.span() for match in whole]
