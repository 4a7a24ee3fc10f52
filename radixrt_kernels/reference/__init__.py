"""Reference implementations of the kernels in plain torch, used by the tests and by the
self-check."""
