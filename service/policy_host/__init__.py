"""Asks the policies, checks their answers, quarantines those that fail, and watches shadows.

It owns each policy's memory and fault count. The core alone calls it; whatever a policy does, the caller
gets an answer that can be followed.
"""
