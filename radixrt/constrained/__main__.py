"""``python -m radixrt.constrained PARENT_PID``: a compiler helper; see compiler_process.py."""

import sys

from radixrt.constrained.compiler_process import main

main(parent_pid=int(sys.argv[1]))
