"""Who was given which device: one file per source that knows. Touches sockets and files, nothing else."""
