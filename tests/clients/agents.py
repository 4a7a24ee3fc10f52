"""Real agents over ten turns, each started by ``radixrt launch``.

Before each turn a file of their project changes, as under an agent's hands. Of the tokens that an
earlier turn has sent, a turn must find :data:`CACHED_SHARE` in the cache. aider writes its rules and
the project's files behind the conversation, so they move with each turn: of its prompts, only what
is new at its place may be computed.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CACHED_SHARE = 0.95
LIMIT_S = 900
QUESTIONS = [
    "Say hello in one sentence.", "What does notes.txt say?", "Again, shorter.", "And in French?",
    "Which line is the longest?", "Name three words of it.", "Is there a date in it?",
    "Write it backwards.", "Thank you. What is left to do?", "Good bye.",
]  # fmt: skip

TURNS = {
    "claude": ([["-p", "{}"]], [["-p", "{}", "--continue"]]),
    "codex": ([["exec", "{}"]], [["exec", "resume", "--last", "{}"]]),
    "opencode": ([["run", "{}"]], [["run", "--continue", "{}"]]),
}
"""The arguments of the first turn, and of the others."""

IN_ONE_RUN = {"aider": ["--no-pretty", "--no-stream", "--yes-always", "notes.txt"]}
"""Agents whose conversation ends with them: all questions come from a pipe."""

UNAVOIDABLE = {"never_seen", "page_rounding", "none"}
"""Causes of tokens that any cache of prefixes computes."""


@dataclass
class Result:
    """An agent's turns."""

    requests: int
    earlier: int
    """Tokens of prompts that the next prompt of the conversation repeats, if the agent only
    appends."""
    cached: int
    """Those of them that came from the cache."""
    avoidable: int
    """Tokens that were computed for a cause that could be avoided."""
    only_appends: bool
    seconds: float
    output: str
    """The end of what it printed, with the reports."""

    @property
    def works(self) -> bool:
        if self.requests < len(QUESTIONS):
            return False
        if self.only_appends:
            return self.cached >= CACHED_SHARE * self.earlier
        return self.cached > 0 and not self.avoidable


def try_agent(name: str, url: str, programs: str, home: Path) -> Result:
    """Ask an agent all questions.

    Args:
        programs: folders that are searched for it before those of ``PATH``.
        home: its home folder.
    """
    project = make_project(home / f"project-{name}")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "CODEX_HOME": str(home)}
    env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    launch = [sys.executable, "-m", "radixrt.cli", "launch", name, "--url", url, "--"]
    begin = time.monotonic()
    if name in IN_ONE_RUN:
        text = "\n".join(QUESTIONS) + "\n/exit\n"
        output = _run([*launch, *IN_ONE_RUN[name]], text, env, project)
    else:
        output = ""
        for number, question in enumerate(QUESTIONS):
            (arguments,) = TURNS[name][number > 0]
            words = [word.format(question) for word in arguments]
            output += _run([*launch, *words], "", env, project)
            with (project / "notes.txt").open("a") as notes:
                notes.write(f"Turn {number} is done.\n")
    seconds = time.monotonic() - begin
    prompts = [
        request
        for address in re.findall(r"each turn: (\S+)", output)
        for request in httpx.get(address).json()["requests"]
    ]
    earlier, cached = repeated(prompts)
    avoidable = sum(one["missed_tokens"] for one in prompts if one["cause"] not in UNAVOIDABLE)
    return Result(len(prompts), earlier, cached, avoidable, name in TURNS, seconds, output)


def repeated(prompts: list[dict[str, Any]]) -> tuple[int, int]:
    """The tokens that a conversation's prompts repeat of the prompts before, and those of them that
    were cached. Prompts that are much shorter than one before are none of the conversation.

    >>> first, side, second = ({"prompt_tokens": p, "cached_tokens": c} for p, c in [(1000, 0), (90, 0), (1200, 990)])
    >>> repeated([first, side, second])
    (1000, 990)
    """
    earlier = cached = longest = 0
    for one in prompts:
        if one["prompt_tokens"] < longest / 2:
            continue
        earlier += min(longest, one["prompt_tokens"])
        cached += min(longest, one["cached_tokens"])
        longest = one["prompt_tokens"]
    return earlier, cached


def make_project(folder: Path) -> Path:
    """A repository with a file."""
    folder.mkdir()
    (folder / "notes.txt").write_text("These are notes.\n")
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


def _run(command: list[str], text: str, env: dict[str, str], cwd: Path) -> str:
    try:
        done = subprocess.run(
            command, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=env, cwd=cwd, timeout=LIMIT_S,
        )  # fmt: skip
        return done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace") + "\n(too slow)"
