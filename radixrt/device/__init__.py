"""Memory and streams of the device a worker computes on."""
