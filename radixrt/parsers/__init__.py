"""How model families write reasoning and tool calls: recognition by the chat template, constraint,
and parser of each format."""
