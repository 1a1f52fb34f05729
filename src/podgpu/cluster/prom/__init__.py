"""This room is the backend that asks Prometheus, or whatever speaks its HTTP API: `backend.py` has a round, the others
its parts."""
