"""Compile pools of servers in the tests' own process: most tests ask for no constraint, and need
none of the processes that compile."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from radixrt.constrained.compiler import jobs
from radixrt.constrained.compiler.pool import CompilePool
from radixrt.tokenizer.constraints import manager


class PoolOnDemand(CompilePool):
    """Starts its helpers at its first job, not with the server."""

    def start(self) -> None: ...

    async def _do(self, *arguments: Any, **options: Any) -> jobs.Reply:
        if not self._keepers:
            super().start()
        return await super()._do(*arguments, **options)


@contextlib.contextmanager
def compilers_on_demand() -> Iterator[None]:
    """The pools of the servers that get their engine's first message in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "CompilePool", PoolOnDemand)
        yield
