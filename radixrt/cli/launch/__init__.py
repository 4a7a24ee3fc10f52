"""The command ``radixrt launch``: a coding agent that works with a server of radixrt."""
