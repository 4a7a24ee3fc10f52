"""Memory, streams and graphs of the device that a worker computes on."""
