"""Proposers: one file and one registry line each (`PROPOSERS` in `runtime.speculation.registry`)."""
