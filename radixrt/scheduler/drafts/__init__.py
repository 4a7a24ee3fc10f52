"""The price of draft tokens, and the comparison of steps with and without them."""
