"""What is known beforehand, as data: DCGM fields, podgpu's families, counter files. Touches nothing outside."""
