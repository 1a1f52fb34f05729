"""The Grafana dashboards, written once as Python: `python -m deploy.dashboards` makes the JSON that is shipped."""
