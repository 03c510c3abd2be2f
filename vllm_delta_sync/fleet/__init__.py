"""The receivers of a run: their heartbeats, and the slots that limit how many pause at once.

Start with ``fleet``. May import ``run`` and what is below.
"""
