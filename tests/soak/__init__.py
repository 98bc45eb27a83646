"""Endurance: a real server under short requests, aborts and pressure. `make soak MINUTES=5`."""
