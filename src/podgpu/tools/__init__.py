"""Commands beside the exporter and the cluster view: doctor, enrich, migrate."""
