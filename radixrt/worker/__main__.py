"""``python -m radixrt.worker``: the worker process."""

from radixrt.base.child import run_child

run_child("worker", "radixrt.worker.process:run_worker")
