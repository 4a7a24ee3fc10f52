"""The normal form: a user's schema in few, plain forms that accept exactly the same values."""
