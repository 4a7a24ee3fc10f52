"""The language is light: what a program on a laptop has to load."""

import subprocess
import sys

HEAVY = (
    "torch",
    "numpy",
    "fastapi",
    "transformers",
    "tokenizers",
    "httpx",
    "pydantic",
    "rich",
    "zmq",
)


def test_importing_the_language_loads_nothing_of_the_engine() -> None:
    code = f"import radixrt.lang, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_program_against_a_server_loads_neither_torch_nor_the_runtime() -> None:
    code = """
import sys
import radixrt.lang as rl
@rl.function
def program(s):
    s += "a" + rl.gen("x")
try:
    program.run(backend="http://127.0.0.1:9")
except rl.ConnectionLost:
    print([m for m in ("torch", "numpy", "fastapi", "pydantic") if m in sys.modules])
    print([m for m in sys.modules if m.startswith(("radixrt.offline.llm", "radixrt.messages", "radixrt.api"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
