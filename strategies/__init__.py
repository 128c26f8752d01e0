"""The server side of every method, one file per method."""
