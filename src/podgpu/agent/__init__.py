"""Reads GPUs, allocations and usage in three loops. Each pass of a loop (a *turn*) publishes a new document."""
