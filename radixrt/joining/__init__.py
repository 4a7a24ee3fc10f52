"""Joins schedulers to a tokenizer process: of the same machine, or of an ingress on another one by
TCP, encrypted by CURVE keys."""
