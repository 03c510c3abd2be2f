"""Check all of a run: documents, digests, contents of objects, declared sums, and the weights themselves.

May import ``run`` and what is below. Begin with ``verify``.
"""
