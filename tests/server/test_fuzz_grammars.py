"""Random grammars of every kind, and one that once stopped a server, delay no other client's stream."""

from tests.constrained.fuzz_grammars import ANSWERED, KINDS, MAX_GAP_S, attacks
from tests.servers import Server

GRAMMARS = 10
"""Of each kind; ``make fuzz-grammars`` sends a hundred times as many."""


def test_random_grammars_delay_no_other_stream(demo_server: Server) -> None:
    outcomes = attacks(demo_server.url, KINDS, range(GRAMMARS))
    assert [each for each in outcomes if each.gap_s > MAX_GAP_S] == []
    assert {each.status for each in outcomes} <= {*ANSWERED}
