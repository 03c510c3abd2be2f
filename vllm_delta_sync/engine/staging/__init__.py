"""Fetch, check, decode and route an update on one rank, beside generation.

May import ``engine.planning`` and what is below. Begin with ``stage``.
"""
