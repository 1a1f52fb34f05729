"""Metric families: which there are, their names and labels, rendering, encoding and parsing. Pure."""
