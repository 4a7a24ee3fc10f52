"""Builds the documentation as a web site."""
