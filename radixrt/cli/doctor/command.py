"""The command ``radixrt doctor``: checks the machine and says the next step for each finding."""

import argparse
import logging
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from radixrt.cli.doctor import machine, speed
from radixrt.cli.doctor.machine import Finding
from radixrt.cli.doctor.models import adapter_findings, model_finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; returns 1 if one of them keeps a server from starting."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # libraries' notes about their own imports
    try:
        findings = list(_findings(arguments))
    finally:
        logging.disable(before)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        _print(findings)
    return int(any(finding.level == "error" for finding in findings))


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    used = speed.other_programs() if arguments.speed else 0.0  # before this one works
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        machine.python, machine.packages, machine.kernels, machine.gpu, machine.memory, machine.files,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # one broken package must not hide the other findings
            yield Finding(
                check.__name__,
                "error",
                f"The check failed: {type(error).__name__}: {error}",
                "Install the missing package: `pip install 'radixrt[server]'`."
                if isinstance(error, ImportError)
                else "Please report it.",
            )
    yield from machine.port(arguments.host, arguments.port)
    if arguments.model is not None:
        found = model_finding(arguments.model)
        yield found
        if arguments.lora:
            yield from adapter_findings(arguments.model, arguments.lora)
    elif arguments.lora:
        yield Finding("adapter", "error", "--lora needs the MODEL of the adapters.")
    if arguments.speed:
        can_run = arguments.model is not None and found.level == "ok"
        yield from speed.findings(arguments.model if can_run else None, used)


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(
            Text.assemble(
                (f"{finding.level:<8}", _STYLES[finding.level]),
                f"{finding.subject:<11}{finding.fact}",
            )
        )
        if finding.advice:
            console.print(Text(f"{'':19}{finding.advice}", "bold"))
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(f"{errors} errors, {warnings} warnings.", markup=False)
