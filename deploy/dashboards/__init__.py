"""Source of the Grafana dashboards. `python -m deploy.dashboards` generates the JSON files in the
chart.
"""
