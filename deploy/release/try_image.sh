#!/usr/bin/env bash
# Starts an image with the built-in model and asks it a question: deploy/release/try_image.sh IMAGE
set -euo pipefail
container=$(docker run --detach --rm --publish 127.0.0.1:30000:30000 "$1")
trap 'docker logs "$container" | tail -20; docker stop --time 40 "$container"' EXIT
for _ in $(seq 120); do
  curl --silent --fail http://127.0.0.1:30000/ready >/dev/null && break
  sleep 1
done
curl --silent --fail http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "The owner of Vidur is Noval. What is the owner of Vidur?"}]}' |
  grep 'The owner of Vidur is Noval.'
