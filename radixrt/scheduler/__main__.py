"""``python -m radixrt.scheduler``: the scheduler process."""

from radixrt.base.child import run_child

run_child("scheduler", "radixrt.scheduler.process:run_scheduler")
