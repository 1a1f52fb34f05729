"""Benchmarks: one per published claim about podgpu's own cost. Run with `python -m bench [NAME]` or
`make bench`.
"""
