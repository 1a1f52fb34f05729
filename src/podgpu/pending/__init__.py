"""Explains why pods that request GPUs are pending, from objects of the API server.

`explain.py` is a pure function of these objects and of the idle holders.
"""
