"""``python -m radixrt.scheduler``: the scheduler process."""

from radixrt.base.child import run_child
from radixrt.scheduler.process import run_scheduler

run_child("scheduler", run_scheduler)
