"""Settings, and their translation from the names of other engines."""
