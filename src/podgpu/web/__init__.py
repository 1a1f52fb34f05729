"""This room owns the HTTP server: it hands out prepared bytes, nothing else. It touches the inbound network."""
