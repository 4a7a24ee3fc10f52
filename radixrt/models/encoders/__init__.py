"""Encoders: models whose tokens see those behind them. They give vectors and classes, and keep no
KV."""
