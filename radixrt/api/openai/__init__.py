"""OpenAI's endpoints: chat completions, completions and the fields of their requests."""
