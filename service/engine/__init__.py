"""The step loop and its thread; text in, text out."""
