"""All attacks at once against an exporter and a cluster view, real processes both, on loopback and bounded."""
