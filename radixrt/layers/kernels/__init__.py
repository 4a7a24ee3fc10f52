"""The operations of layers for which each kind of device has kernels of its own."""
