"""What a server shows: status, metrics, log lines, readiness, and which weights produced which tokens.

May import ``engine.core`` and what is below. Begin with ``status``.
"""
