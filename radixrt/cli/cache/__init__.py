"""The command ``radixrt cache``: shows cache directories, and ships KV as files."""
