"""The receivers of a run: their heartbeats, and how many may pause at once.

May import ``run`` and what is below. Begin with ``fleet``.
"""
