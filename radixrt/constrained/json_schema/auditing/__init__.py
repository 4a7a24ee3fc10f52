"""Decides how a normalised schema is enforced: by a backend alone, by a backend and checks, or not at all."""
