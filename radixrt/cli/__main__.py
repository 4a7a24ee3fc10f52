"""``python -m radixrt.cli``: the same as ``radixrt``."""

from radixrt.cli.main import main

main()
