"""Proof of who calls: the identities file, the tokens and certificates in it, and the check of a call's own.

Owns which identities are in force, and what a bearer token looks like. `rpc` asks it once a call; the command
`tokens` edits the file; neither gRPC nor the engine is known here. Invariants: a secret is hashed and
forgotten; no log line or error tells one, and a refusal doesn't tell the caller which part of a credential
was wrong.
"""
