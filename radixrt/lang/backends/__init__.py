"""What answers the calls of programs."""
