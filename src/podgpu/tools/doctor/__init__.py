"""Implements `podgpu doctor`, which checks a node and reports findings with advice."""
