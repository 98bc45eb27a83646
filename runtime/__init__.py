"""Token-level engine: token ids in, token ids out. Import `runtime.api`; the rest is private to the engine process."""
