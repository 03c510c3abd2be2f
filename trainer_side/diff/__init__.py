"""Compare live tensors with the version published last, and keep what changed.

May import ``trainer_side.model``. Begin with ``engine``; ``baseline`` holds the bits of the version published last.
"""
