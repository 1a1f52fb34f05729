"""This room finds out who really uses a device: from the driver's processes to the containers they run in. Touches
/proc, nothing else."""
