"""Sizes of what tiles are coded with: alphabets of symbols, classes of elements, and tables of codes."""

LONGEST = 11
"""Largest length of a code: a table of 2^11 entries of two bytes, one for each class, fits a core's first cache."""
KINDS = 3
"""Kinds of a symbol: zigzag 1, zigzag 2, or a value that follows."""
SYMBOLS = 252
"""Of either alphabet: 84 tokens of gaps, each with KINDS kinds; or the tokens of 64-bit values."""
GAP_TOKENS = SYMBOLS // KINDS

CLASSES = 4
"""Classes of a tile, besides the elements of none. More would save bytes, and cost the time of another comparison of
each element on both sides."""
OTHERS = CLASSES
"""The table of gaps between elements without a class."""
PLAIN = CLASSES + 1
"""The table of plain tiles."""
TABLES = CLASSES + 2
