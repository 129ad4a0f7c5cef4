"""The router: asks a routing policy which replica takes a request, and keeps what that policy looks at.

It owns each replica's load (the last report, corrected by what was sent and ended since) and what each
replica's prefix cache is believed to hold. The simulator, the client that balances and the Ray application
each have one. Bound to one thread; reads no clock; imports policies, their host and the standard library.
"""
