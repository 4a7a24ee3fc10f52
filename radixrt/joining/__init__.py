"""Joins engines on other machines to the tokenizer process of an ingress: TCP, encrypted by CURVE keys."""
