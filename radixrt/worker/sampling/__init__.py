"""From logits to tokens: grammar masks, penalties, draws, log-probabilities."""
