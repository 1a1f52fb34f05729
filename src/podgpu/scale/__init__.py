"""GPU metrics of workloads for KEDA and the HPA.

A missing value is an error, never 0: 0 would scale pods down.
"""
