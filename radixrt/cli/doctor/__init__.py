"""The commands ``radixrt doctor`` and ``radixrt models``: findings about this machine and its
checkpoints."""
