"""The documentation, and `python -m docs.generate`, which keeps its tables true."""
