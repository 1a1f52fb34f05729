"""Benchmarks of the claims podgpu makes about its own cost. Run with `python -m bench` or `make bench`."""
