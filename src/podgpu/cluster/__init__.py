"""The cluster view. Collectors read the nodes, `state` merges the readings, `view` and `metrics` render the result."""
