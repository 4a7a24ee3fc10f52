"""Tries clients and agents, unmodified but for the base URL, against a server with a tiny random
model: ``make test-clients``.

They live in environments of their own, in ``.clients``. What they send is not kept.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.checkpoints.image_checkpoints import make_image_checkpoint
from tests.clients import agents
from tests.clients.checkpoint import end_soon, make_agent_checkpoint
from tests.clients.with_python import IMAGES
from tests.servers import Server, serving

HERE = Path(__file__).parent
LIMIT_S = 300


def make_environments(folder: Path) -> tuple[Path, Path]:
    """Install the clients, where they are not yet. Returns Python and the folder of the JavaScript
    packages."""
    python, node = folder / "python" / "bin" / "python", folder / "node"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "python"], check=True)
        packages = ["-r", HERE / "requirements.txt"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    if shutil.which("npm") and not (node / "node_modules").exists():
        node.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "package.json", node)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=node, check=True)
    return python, node


def sdk_commands(url: str, python: Path, node: Path) -> dict[str, list[str]]:
    """The checks of the SDKs."""
    script = HERE / "with_python.py"
    named = subprocess.run([python, script], capture_output=True, text=True, check=True)
    commands = {
        name: [str(python), str(script), url, name] for name in named.stdout.split("\n")[:-1]
    }
    if not (node / "node_modules").exists():
        print("npm is missing: clients in JavaScript are left out.")
        return commands
    shutil.copy(HERE / "with_node.mjs", node)
    listed = subprocess.run(["node", node / "with_node.mjs"], capture_output=True, text=True, check=True)  # fmt: skip
    for name in listed.stdout.split("\n")[:-1]:
        commands[name] = ["node", str(node / "with_node.mjs"), url, name]
    return commands


def run(command: list[str], env: dict[str, str], cwd: Path) -> tuple[bool, float, str]:
    """Whether it succeeded, its seconds, and the end of its output."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
        output, succeeded = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, succeeded = error.stdout or b"", False
    text = output.decode(errors="replace")
    return succeeded, time.monotonic() - begin, text[-1500:]


def try_agents(url: str, programs: Path, home: Path, only: list[str] | None) -> list[str]:
    """Let the agents that are installed converse for ten turns; returns the failures."""
    failures = []
    print(
        f"{'agent':<24} {'result':<7} {'seconds':>7} {'requests':>8} {'earlier':>8} {'cached':>8}"
    )
    for name in [*agents.TURNS, *agents.IN_ONE_RUN]:
        is_there = shutil.which(name, path=f"{programs}:{os.environ['PATH']}")
        if not is_there or (only and name not in only):
            continue
        done = agents.try_agent(name, url, str(programs), home)
        result = "works" if done.works else "fails"
        print(f"{name:<24} {result:<7} {done.seconds:>7.1f} {done.requests:>8} {done.earlier:>8} {done.cached:>8}", flush=True)  # fmt: skip
        if not done.works:
            failures.append(f"---- {name}\n{done.output[-3000:]}")
    return failures


def counts(server: Server) -> dict[str, int]:
    """Answers, prompt tokens and cached tokens so far."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = dict.fromkeys(("answers", "prompt_tokens", "cached_tokens"), 0)
    for line in text.splitlines():
        for name in found:
            if line.startswith(f"radixrt_{name}_total"):
                found[name] += int(float(line.split()[-1]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".clients"))
    parser.add_argument("--only", nargs="*", help="names of checks")
    args = parser.parse_args()
    python, node = make_environments(args.environments.absolute())
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        model = end_soon(make_agent_checkpoint(Path(folder) / "tiny"))
        flags = ("--served-model-name", "tiny", "--max-total-tokens", "140000")
        seeing_model = make_image_checkpoint("qwen3_vl", Path(folder) / "seeing")
        names = ("--served-model-name", "tiny")
        with serving(model, *flags) as server, serving(seeing_model, *names) as seeing:
            sdks = sdk_commands(server.url, python, node)
            print(f"{'client':<24} {'result':<7} {'seconds':>7} {'requests':>8} {'prompt':>8} {'cached':>8}")  # fmt: skip
            for name, command in sdks.items():
                if args.only and name not in args.only:
                    continue
                asked = seeing if name == IMAGES else server
                command = [asked.url if part == server.url else part for part in command]
                before = counts(asked)
                succeeded, seconds, output = run(command, dict(os.environ), home)
                after = counts(asked)
                answers, prompt, cached = (after[key] - before[key] for key in before)
                result = "works" if succeeded and answers else "fails"
                print(f"{name:<24} {result:<7} {seconds:>7.1f} {answers:>8} {prompt:>8} {cached:>8}", flush=True)  # fmt: skip
                if result == "fails":
                    failures.append(f"---- {name}\n{output}")
            failures += try_agents(server.url, node / "node_modules" / ".bin", home, args.only)
            server_errors = [line for line in (*server.log, *seeing.log) if "Traceback" in line]
    print("\n".join(failures))
    if server_errors:
        print(f"The server's log has {len(server_errors)} tracebacks.")
    return 1 if failures or server_errors else 0


if __name__ == "__main__":
    sys.exit(main())
