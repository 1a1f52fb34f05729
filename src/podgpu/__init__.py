"""podgpu: which pod uses which GPU, how much of it, and what that costs."""

__version__ = "0.1.0"
