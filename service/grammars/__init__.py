"""Structured output: what may follow, token by token, so that an answer has the form that was asked for.

Owns compiled grammars, kept by what they were compiled from, and how far each sequence has come in its own.
`engine` has grammars compiled before a request is queued, `model` asks for the tokens that may follow,
`startup` wires both to one `Grammars`. Invariant: where a sequence stands is derived from its output tokens
alone, so nothing that happens to its KV, its step or its place in a queue can lose it.
"""
