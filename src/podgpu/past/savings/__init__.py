"""GPUs that could be given back: computed from what pods do. Reads nothing."""
