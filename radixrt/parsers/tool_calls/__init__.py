"""The formats in which models write tool calls, one file a format."""
