"""Does a worker whose steps overlap give the tokens of one that does one thing after the other?"""

from collections.abc import Callable

from tests.engine.in_process import InProcessEngine

Engines = Callable[..., tuple[InProcessEngine, InProcessEngine]]
