"""Random grammars of every kind, and one that once stopped a server, delay no other client's
stream."""

from tests.constrained.fuzz_grammars import ANSWERED, KINDS, attacks
from tests.servers import Server

GRAMMARS = 3
"""Of each kind; ``make fuzz-grammars`` sends 1,000, and has the bound of 0.2 s."""

MAX_GAP_S = 1.0
"""Beside other tests, a machine makes gaps of its own. The grammars that this is about made gaps of
5 to 52 s."""


def test_random_grammars_delay_no_other_stream(demo_server: Server) -> None:
    outcomes = attacks(demo_server.url, KINDS, range(GRAMMARS))
    assert [each for each in outcomes if each.gap_s > MAX_GAP_S] == []
    assert {each.status for each in outcomes} <= {*ANSWERED}
