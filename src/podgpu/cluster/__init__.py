"""The cluster view. Collectors read the nodes, `state` merges the readings, and `view` and `metrics` render them."""
