"""The HTTP server: prepared bytes out, nothing else. Touches the inbound network."""
