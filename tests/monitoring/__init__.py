"""The dashboard and the alert rules of ``deploy/monitoring``."""
