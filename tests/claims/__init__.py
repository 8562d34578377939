"""What notebook 18 measures: `python -m tests.claims.measuring data/claims.json`."""
