"""Bring back what a damaged run lacks, from a mirror or from what is left of it, and only what can be proven.

Begin with ``repair``.
"""
