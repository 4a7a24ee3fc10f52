"""``python -m radixrt.api``: the API process."""

from radixrt.base.child import run_child

run_child("api", "radixrt.api.server:run_api")
