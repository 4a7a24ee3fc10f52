"""``python -m radixrt.launch_server``: the same as ``radixrt serve``."""

import sys

from radixrt.cli.main import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
