"""From a request's prompt to token ids."""
