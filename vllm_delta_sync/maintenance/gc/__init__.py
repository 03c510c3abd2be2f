"""Remove what no retained version needs.

``graph`` reads what is there, ``policy`` decides (pure, no store), ``collect`` removes. Begin with ``collect``.
"""
