"""This room owns what autoscalers are told of the GPUs that a workload's pods hold, and why not where nothing can be
told.

A figure that nobody knows is an error here and never 0: whatever is said makes somebody else's pods come or go.
"""
