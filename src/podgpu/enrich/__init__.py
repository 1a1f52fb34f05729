"""Adds pod labels to an existing exporter's metrics, in a file for node_exporter's textfile collector."""
