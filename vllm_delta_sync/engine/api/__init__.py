"""How requests reach the receiver: HTTP routes, admission by version, and ``attach`` for ``LLM`` and ``AsyncLLM``.

May import ``engine.follow`` and what is below. Begin with ``routes``.
"""
