"""The host of policies: asks them, checks their answers, quarantines those that fail, watches shadows.

It owns each policy's memory, fault count and time. The core alone asks, through `host.PolicyHost`, and gets
an answer that can be followed whatever a policy does, short of never returning: that is reported while it
lasts (`calls.CallWatch`). `reports` is what others see. Imports `policies` and the standard library only.
"""
