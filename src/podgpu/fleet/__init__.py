"""The cluster view. In each round, it reads all nodes, chooses one exporter per node and one node
per GPU, divides shared GPUs among their holders, and publishes a `ClusterState`.
"""
