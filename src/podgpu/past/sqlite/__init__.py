"""The past that the recorder stored, read from SQLite."""
