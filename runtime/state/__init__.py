"""Who owns KV blocks, state slots and recurrent state: `StatePool` and what it is made of."""
