"""Hooks for runs of many tests: distribution over processes, and a summary of skips and started
processes."""

import functools
import gc
import importlib.util
import os
import random
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import certifi
import numpy as np
import pytest
import torch

EVERY_EXAMPLE = "RADIXRT_EVERY_EXAMPLE" in os.environ


def examples(in_full: int) -> int:
    """Random examples of a test that has many: a third of them in ``make test``, all in ``make
    test-random``."""
    return in_full if EVERY_EXAMPLE else in_full // 3


DEMO_SERVER = "demo server"
SHARED = {
    "tests/cli/test_cache_bundles.py": DEMO_SERVER,
    "tests/cli/test_chat.py": DEMO_SERVER,
    "tests/cli/test_launch.py": DEMO_SERVER,
    "tests/browser/test_page.py": DEMO_SERVER,
    "tests/docs/test_snippets.py": DEMO_SERVER,
    "tests/server/test_cache_dir.py": DEMO_SERVER,
    "tests/lang/test_docs.py": DEMO_SERVER,
    "tests/lang/test_documents.py": DEMO_SERVER,
    "tests/lang/test_examples.py": DEMO_SERVER,
    "tests/lang/test_leaving.py": DEMO_SERVER,
    "tests/lang/test_servers.py": DEMO_SERVER,
    "tests/server/test_demo.py": DEMO_SERVER,
    "tests/server/test_shared_pool.py": DEMO_SERVER,
    "tests/server/test_speculation.py": DEMO_SERVER,
    "tests/server/test_structured.py": DEMO_SERVER,
    "tests/engine/test_llm.py": "LLM",
    "tests/engine/test_llm_cache.py": "LLM",
    "tests/engine/test_llm_pooling.py": "LLM",
    "tests/engine/test_reports.py": "LLM",
    "tests/engine/test_llm_structured.py": DEMO_SERVER,
    "tests/server/test_cache.py": "tiny server",
    "tests/server/test_prompt_scores.py": "tiny server",
    "tests/server/test_requests.py": "tiny server",
}
"""Files of tests that use one server or engine: they run in the same process, one after the
other."""

FIRST = (
    "tests/server/", "tests/docs/", "tests/lang/", "tests/engine/", "tests/constrained/test_pool.py",
    "tests/constrained/test_enforced.py", "tests/constrained/test_matchers.py", "tests/bench/", "tests/triton/",
    "tests/test_demo_model.py", "tests/worker/test_sampler.py", "tests/api/",
)  # fmt: skip
"""Slow files begin first, so that no process is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for ``make test``; a single process keeps the usual order within them."""
    places = {item.nodeid.partition("::")[0]: len(FIRST) for item in items}
    for file in places:
        for place, prefix in enumerate(FIRST):
            if file.startswith(prefix):
                places[file] = place
                break
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not look through it again (see
    tests/__init__.py)."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed every test by its name, before its fixtures, so that it draws the same numbers in each
    run."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send whole files to a process, and files that share a server to the same one."""
    from xdist.scheduler import LoadFileScheduling

    gc.enable()  # this process collects no tests

    class BySharedServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return SHARED.get(file, file)

    return BySharedServer(config, log) if config.getvalue("dist") == "loadfile" else None


started: Counter[str] = Counter()
"""Python modules and programs that the tests have started, with their numbers."""


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and _counting:
        started[_kind(arguments[1])] += 1


def _kind(command: str | bytes | Sequence[Any]) -> str:
    if isinstance(command, str | bytes):
        return "shell"
    words = [os.fsdecode(word) for word in command]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return "python" if words[0] == sys.executable else os.path.basename(words[0])


_counting = False
_certificate = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 (removed with this process)
_cpu_seconds: Counter[str] = Counter()


def pytest_configure() -> None:
    """Count started processes; let the clients of this process have one TLS context, and those of
    others one certificate, as it takes each client 20 ms to load all.

    Tests talk to this machine alone, and without TLS.
    """
    global _counting
    if not _counting:
        for name in ("httpx", "httpx2"):  # of which clients of APIs have one or the other
            if importlib.util.find_spec(name) is not None:
                transports: Any = importlib.import_module(f"{name}._transports.default")
                transports.create_ssl_context = _once_a_file(transports.create_ssl_context)
        sys.addaudithook(_count)  # it cannot be removed
        end = "-----END CERTIFICATE-----"
        _certificate.write(Path(certifi.where()).read_text("utf-8").partition(end)[0] + end)
        _certificate.flush()
        os.environ.setdefault("SSL_CERT_FILE", _certificate.name)
    _counting = True


def _once_a_file(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once for equal arguments and certificates."""
    made = functools.cache(lambda certificates, *arguments, **named: make(*arguments, **named))
    return lambda *arguments, **named: made(os.environ["SSL_CERT_FILE"], *arguments, **named)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # libraries report what is left at the end
    times = os.times()
    _cpu_seconds["tests"] += times.user + times.system
    if not session.config.pluginmanager.hasplugin("dsession"):  # whose children tell their own
        _cpu_seconds["processes"] += times.children_user + times.children_system
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["started"], output["cpu_seconds"] = dict(started), dict(_cpu_seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the numbers of a process of xdist to those of this one."""
    output = getattr(node, "workeroutput", {})
    started.update(output.get("started", {}))
    _cpu_seconds.update(output.get("cpu_seconds", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason for a skip with the number of tests, and the processes that were
    started."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} {reason}")
    if started:
        terminalreporter.section("started processes")
        terminalreporter.write_line(", ".join(f"{n} {name}" for name, n in started.most_common()))
        terminalreporter.write_line(
            f"CPU seconds: {_cpu_seconds['tests']:.0f} of the tests, {_cpu_seconds['processes']:.0f} of the processes"
        )


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(text.removeprefix("Skipped: ").split()) or "no reason given"
