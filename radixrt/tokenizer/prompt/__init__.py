"""Turns a request's prompt into token ids."""
