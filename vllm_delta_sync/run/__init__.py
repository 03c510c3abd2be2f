"""One run in a bucket: its documents, its head, plans from one version to another, and restoring weights.

May import ``bucket``, ``cache``, ``trust`` and what is below. Begin with ``run_reader``, ``graph``, ``read_plan`` and
``restore``.
"""
