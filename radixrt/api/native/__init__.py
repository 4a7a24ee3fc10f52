"""radixrt's own endpoints beside OpenAI's: generate, scoring, tokenizing, grammars."""
