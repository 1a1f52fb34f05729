"""Converts dashboards, rules and queries from the names and units of dcgm-exporter 4.8 to those of
4.9.
"""
