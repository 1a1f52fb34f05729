"""This room owns rewriting dashboards, rules and PromQL from one dcgm-exporter's names to the other's, units included.
Pure."""
