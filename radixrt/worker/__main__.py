"""``python -m radixrt.worker``: the worker process."""

from radixrt.base.child import run_child
from radixrt.worker.process import run_worker

run_child("worker", run_worker)
