"""The subcommands of ``radixrt``."""
