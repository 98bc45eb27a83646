"""How Lockstep is deployed and watched; the programs that make the files here. Not part of the wheel."""
