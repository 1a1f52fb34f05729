"""This room owns the Prometheus text format, both ways. Pure: families in, bytes out, and back."""
