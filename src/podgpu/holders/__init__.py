"""This room knows who was given which device: one file per source that tells. Touches sockets and files, nothing
else."""
