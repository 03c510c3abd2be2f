"""Garbage collection: remove what no retained version needs.

``graph`` reads the bucket, ``policy`` decides without a store, ``collect`` removes. Start with ``collect``.
"""
