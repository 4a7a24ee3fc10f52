"""``python -m radixrt.api``: the API process. Imports make no garbage, as in
``radixrt/worker/__main__.py``."""

import gc

gc.disable()

from radixrt.api.server import run_api  # noqa: E402
from radixrt.base.child import run_child  # noqa: E402

gc.freeze()
gc.enable()
run_child("api", run_api)
