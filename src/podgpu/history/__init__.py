"""Stores values of GPUs and pods in SQLite and builds the JSON of `/api/v1/history`."""
