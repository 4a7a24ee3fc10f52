"""The dense architectures, one file a family."""
