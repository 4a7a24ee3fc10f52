"""Entry point of the zygote of compiler helpers: ``python -m radixrt.constrained PARENT_PID`` (see
compiler/process.py)."""

import sys

from radixrt.constrained.compiler.process import main

main(parent_pid=int(sys.argv[1]))
