"""Programs to read and to start from, each run by a test: `python -m pageturner.service.examples.NAME`.

They own nothing, and nothing imports them. Invariant: they call only what a user may call (`service.client`,
`service.llm`, policies, the laboratory).
"""
