"""``delta-sync doctor``: try what a publisher and a receiver need of a bucket, and ask a server how it is.

May import ``maintenance`` and what is below. Begin with ``doctor``.
"""
