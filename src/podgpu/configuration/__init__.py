"""This room owns what the user may change while podgpu runs: counters, from a file or a ConfigMap, and which pod labels
count."""
