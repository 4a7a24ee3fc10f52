"""The web page of the server."""
