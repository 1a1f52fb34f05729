"""The HTTP servers: listeners, TLS, authentication, metrics, probes, web page and JSON API."""
