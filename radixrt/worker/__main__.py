"""``python -m radixrt.worker``: the worker process.

Garbage collection is off while torch is imported: what an import makes is no garbage, and looking
through it again and again takes a fifth of the time. Nor does the collector visit it later, while
the model is loaded.
"""

import gc

gc.disable()

from radixrt.base.child import run_child  # noqa: E402
from radixrt.worker.process import run_worker  # noqa: E402

gc.freeze()
gc.enable()
run_child("worker", run_worker)
