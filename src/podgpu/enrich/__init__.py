"""This room puts pod labels on an existing exporter's exposition, in a file for node_exporter's textfile
collector."""
