"""Compare live tensors with the last published version, and collect what changed.

May import ``trainer_side.model``. Begin with ``engine``; ``baseline`` holds the bits of the last published version.
"""
