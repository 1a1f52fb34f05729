"""Turns a machine into a `NodeState`: GPUs, holders, usage."""
