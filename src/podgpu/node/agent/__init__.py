"""Reads GPUs, allocations and usage in three loops, and publishes a new document after each
reading.
"""
