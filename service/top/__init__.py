"""`pageturner top`: a live view of a server in the terminal.

Owns what is read of a server at a moment, what that says beside the readings before, and how it is drawn. The
command of its name calls it. Invariants: it is a client like any other and changes nothing but what its user
asks to be ended; a server that stalls, restarts or is gone is a state that is shown, never an end of the
view. Textual is needed by `app` and `screens` alone.
"""
