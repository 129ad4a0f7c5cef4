"""The flight recorder: what a scheduler was told and decided, kept, written, replayed and explained.

It owns the record and takes snapshots of the core, which never imports it. No record holds a
prompt or an answer.
"""
