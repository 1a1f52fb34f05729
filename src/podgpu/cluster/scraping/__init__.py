"""The backend that scrapes the exporters itself: `backend.py` has a round, `page.py` reads what one of them says."""
