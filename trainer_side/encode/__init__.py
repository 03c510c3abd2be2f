"""Encode changes as objects: the update gate, the choice of codec, and encoding.

May import ``trainer_side.diff``. Begin with ``encoder``.
"""
