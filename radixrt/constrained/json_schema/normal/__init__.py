"""The normal form: a user's schema rewritten into few, plain forms that accept exactly the same
values."""
