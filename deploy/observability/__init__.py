"""Makes the dashboards and rules from the metrics table: `python -m deploy.observability`."""
