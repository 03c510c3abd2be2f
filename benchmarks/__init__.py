"""Benchmarks, run as ``python -m benchmarks.NAME --json FILE [--quick]``.

Each writes rows of bench, case, metric, value, unit and, where it compares, peer.
"""
