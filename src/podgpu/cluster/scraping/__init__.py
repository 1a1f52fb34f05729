"""This room is the backend that scrapes exporters itself: `backend.py` has a round, `exposition.py` reads
an exporter's text."""
