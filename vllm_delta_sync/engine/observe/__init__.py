"""What a server reports: status, metrics, readiness, and which version produced which tokens.

May import ``engine.core`` and what is below. Begin with ``status``.
"""
