"""Attributes GPU usage to workloads and adds it up. Reads only /proc."""
