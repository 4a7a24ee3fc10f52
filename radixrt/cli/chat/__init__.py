"""The commands ``radixrt run`` and ``radixrt chat``: a chat in the terminal."""
