"""The cluster view: reads all nodes, chooses, divides and publishes one `ClusterState` per
round.
"""
