"""Attention backends: how a step reads state, what it keeps as candidates, and how one of them is committed."""
