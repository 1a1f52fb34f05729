"""Metric families: definitions, rendering, encoding and parsing. No input or output."""
