"""`make torture` runs this folder; a usual run leaves it out."""

import os

if "RADIXRT_TORTURE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
