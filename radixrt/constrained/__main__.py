"""Entry point of a compiler helper: ``python -m radixrt.constrained PARENT_PID`` (see compiler/process.py)."""

import sys

from radixrt.constrained.compiler.process import main

main(parent_pid=int(sys.argv[1]))
