"""The HTTP servers of podgpu: listeners, TLS, authentication, metrics, probes, web page and JSON
API.
"""
