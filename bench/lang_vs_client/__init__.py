"""What the language's programs cost beside the same programs with the openai client."""
