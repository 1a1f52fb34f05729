"""Converts dashboards, rules and queries between the names and units of dcgm-exporter 4.8 and 4.9."""
