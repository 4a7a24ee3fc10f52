"""Readers of request fields that several endpoints share."""
