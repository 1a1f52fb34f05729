"""Defines, renders, encodes and parses metric families.

Modules of this package read only their own tables.
"""
