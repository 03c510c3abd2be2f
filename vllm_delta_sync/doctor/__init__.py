"""``delta-sync doctor``: test what publishers and receivers need from a bucket, and check a server.

May import ``maintenance`` and the packages below it. Start with ``doctor``.
"""
