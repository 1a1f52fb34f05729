"""Reads GPUs, holders and usage in three cadences, and publishes one document per turn."""
