"""Reads GPUs, allocations and usage in loops, and publishes a document after each reading."""
