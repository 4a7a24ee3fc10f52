"""Servers whose processes are threads of the tests' own process, with a real model: for tests of what
a server answers. Those of its processes have :mod:`tests.servers`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radixrt.models.checkpoint import resolve_model_path
from tests.api.conftest import RunningServer, starting
from tests.servers.real_engine import RealModel


@contextlib.contextmanager
def serving_in_process(model: Path | str, **settings: Any) -> Iterator[RunningServer]:
    """Serve a model until the block ends, with the settings that :func:`tests.servers.run_server`
    gives."""
    given = {"speculation": "off", "disable_shared_answers": True, "tool_call_parser": "auto"}
    folder = resolve_model_path(str(model))
    with starting(folder) as start:
        yield start(scheduler_type=RealModel, **{**given, **settings})
