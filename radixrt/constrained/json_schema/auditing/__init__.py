"""Who enforces a normalised schema: a backend alone, a backend and checks, or nobody."""
