"""Writes the health of a node's GPUs where others look: to the API server, and to NVSentinel."""
