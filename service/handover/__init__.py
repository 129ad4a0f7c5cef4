"""Has the prompts of a decoding server computed by others: whom to ask, for what, and when to leave it.

Owns the connections to the servers that prefill. `service.startup` builds it, the engine calls it through
`engine.handover.Handover`; its invariant is that whatever becomes of a hand-over, the request goes on.
"""
