"""An existing exporter's page with pod labels on it, in a file for node_exporter's textfile collector (seed 000)."""
