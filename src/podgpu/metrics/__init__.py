"""The catalogue holds what is known beforehand, as data: DCGM's fields, podgpu's families, counter files. Pure."""
