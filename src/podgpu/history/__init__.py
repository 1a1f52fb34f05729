"""Figures of GPUs and pods over time, in SQLite, and the JSON of `/api/v1/history`."""
