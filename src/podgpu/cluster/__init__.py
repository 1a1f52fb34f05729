"""This room makes the view over many nodes: backends read them, the view is assembled from what they read, and rendered
once."""
