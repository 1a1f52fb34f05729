"""Converts dashboards, rules and queries from dcgm-exporter 4.8 to 4.9: names and units."""
