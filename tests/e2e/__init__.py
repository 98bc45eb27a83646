"""The real server, as a process, on the embedded model."""
