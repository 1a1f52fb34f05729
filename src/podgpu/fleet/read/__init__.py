"""Reads nodes: from exporters, from Prometheus, and from Kubernetes."""
