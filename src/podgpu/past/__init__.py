"""Records the cluster's state and charges, and answers questions about past times."""
