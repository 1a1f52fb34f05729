"""`podgpu doctor`: checks a node or the cluster's autoscalers and reports findings with advice."""
