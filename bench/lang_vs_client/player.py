"""Runs a program once for each line of its input: ``python -m bench.lang_vs_client.player NAME``.

Each program has one process, so imports and, after the first run, the client's connections are warm. Answers each line with a line
of JSON: the seconds of ``main()``, and the last line that it printed.
"""

import asyncio
import contextlib
import importlib
import io
import json
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "lang"


def main() -> None:
    sys.path.insert(0, str(FOLDER))
    program = importlib.import_module(sys.argv[1]).main
    with asyncio.Runner() as runner:
        for _ in sys.stdin:
            printed = io.StringIO()
            start = time.perf_counter()
            with contextlib.redirect_stdout(printed):
                if (coroutine := program()) is not None:
                    runner.run(coroutine)
            seconds = time.perf_counter() - start
            last_line = printed.getvalue().strip().rpartition("\n")[2]
            print(json.dumps({"seconds": seconds, "last_line": last_line}), flush=True)


if __name__ == "__main__":
    main()
