"""How requests reach the receiver: HTTP routes, admission by version, offline ``LLM`` and ``AsyncLLM``.

May import ``engine.follow`` and what is below. Begin with ``routes``.
"""
