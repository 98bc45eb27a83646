"""The routes: thin, parse and hand on."""
