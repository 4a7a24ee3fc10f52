"""``python -m radixrt.api``: the API process."""

from radixrt.api.server import run_api
from radixrt.base.child import run_child

run_child("api", lambda config, channels, arguments: run_api(config, channels, arguments.listen_fd))
