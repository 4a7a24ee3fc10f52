"""``python -m radixrt.tokenizer --run-dir DIR``: started by the supervisor."""

import argparse
import logging
import sys
from pathlib import Path

import msgspec

from radixrt.config import ServerConfig
from radixrt.errors import ConfigError
from radixrt.ipc import Channels
from radixrt.tokenizer.process import run_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args().run_dir
    config = msgspec.json.decode((run_dir / "config.json").read_bytes(), type=ServerConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s tokenizer %(message)s")
    try:
        run_tokenizer(config, Channels(run_dir))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
