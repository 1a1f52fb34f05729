"""The documentation and the scripts that generate its tables and screenshots."""
