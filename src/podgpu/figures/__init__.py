"""Flat devices, as `top`, `history` and `autoscale` read them until they use `ClusterState` and its view."""
