"""The program that makes Lockstep's embedded default model, from its text to its figures."""
