from radixrt.api.server import run_api
from radixrt.child import run_child

run_child("api", lambda config, channels, arguments: run_api(config, channels, arguments.listen_fd))
