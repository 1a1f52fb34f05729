"""What the user may change while podgpu runs: the counters, from a file or a ConfigMap. Touches files."""
