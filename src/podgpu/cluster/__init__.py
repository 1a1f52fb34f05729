"""The cluster view. Collectors read the nodes, `state` merges the readings, `view` and `metrics` produce the output."""
