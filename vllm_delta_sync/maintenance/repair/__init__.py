"""Restore what a damaged run lacks, from a mirror or from the rest of the run, and only what is proven correct.

Start with ``repair``.
"""
