"""What the grammar libraries do with JSON schemas, measured with probes of our own."""
