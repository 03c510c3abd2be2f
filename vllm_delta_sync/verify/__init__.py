"""Check a whole run: documents, digests, contents of objects, declared fingerprints, and the weights themselves.

May import ``run`` and what is below. Begin with ``verify``.
"""
