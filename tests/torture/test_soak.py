"""A short soak: invariants, failures, files and threads under a mixed load."""

import os
import subprocess
import sys


def test_two_minutes_of_mixed_load_break_nothing() -> None:
    environment = {**os.environ, "SOAK_MINUTES": os.environ.get("SOAK_MINUTES", "2")}
    command = [sys.executable, "-m", "tests.torture.soak"]
    assert subprocess.run(command, env=environment).returncode == 0
