"""What settings are, and what has become of those of the last release."""
