"""Implements `podgpu doctor`, which checks a node or the cluster's autoscalers and reports findings with advice."""
