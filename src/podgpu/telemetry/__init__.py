"""Where numbers come from: one file per vendor library or feed. Touches drivers and sysfs, nothing else."""
