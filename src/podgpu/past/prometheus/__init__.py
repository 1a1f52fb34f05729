"""The past in Prometheus or a compatible server."""
