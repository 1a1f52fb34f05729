"""The Prometheus text format. Pure: families in, bytes out."""
