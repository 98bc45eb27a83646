"""Model families: one file and one registry line each (`FAMILIES` in `runtime.models.registry`)."""
