"""The architectures with a mixture of experts, one file a family."""
