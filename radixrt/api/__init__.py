"""The api process: HTTP, JSON, server-sent events, authentication and metrics. It sees no
tokenizer."""
