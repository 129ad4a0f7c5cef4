"""Drafts: guesses at what a sequence says next, and how many of them are worth a step's time. Pure."""
