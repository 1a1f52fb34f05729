"""Rewrites dashboards, rules and queries between dcgm-exporter 4.8's and 4.9's names and units."""
