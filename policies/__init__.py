"""Pure scheduling decisions: frozen views in, a ranking or a choice out. Standard library only."""
