"""The figures of a run: as tables for people, as JSON for programs, as a page to keep.

It owns how figures are shown, never how they come about. The command line calls it. The JSON document holds
all that a page shows, so that any run can be drawn, or compared, later.
"""
