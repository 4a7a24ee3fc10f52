"""``python -m radixrt.api --run-dir DIR --listen-fd FD``: started by the supervisor."""

import argparse
import logging
import sys
from pathlib import Path

import msgspec

from radixrt.api.server import run_api
from radixrt.config import ServerConfig
from radixrt.ipc import Channels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    arguments = parser.parse_args()
    config = msgspec.json.decode(
        (arguments.run_dir / "config.json").read_bytes(), type=ServerConfig
    )
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s api %(message)s")
    run_api(config, Channels(arguments.run_dir), arguments.listen_fd)
    return 0


if __name__ == "__main__":
    sys.exit(main())
