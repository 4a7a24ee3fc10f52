"""The host's time for a step on a GPU, measured without one: ``python -m bench.gpu.host``."""
