"""Model architectures, and the loading of checkpoints."""
