"""Who really ran on a shared GPU: the driver's context-switch log, from its ioctls to busy time per process."""
