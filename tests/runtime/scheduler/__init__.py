"""The scheduler against a fake device."""
