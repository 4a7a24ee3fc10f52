"""The Gemma models, one file a generation."""
