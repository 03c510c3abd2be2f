"""The codecs of delta objects by name, and what each of them needs.

Code that decides by codec asks these tables. To add a codec, begin here.
"""

from typing import Literal, get_args

Codec = Literal["tiled", "plain", "raw"]
RelativeCodec = Literal["tiled", "plain"]

CODECS: tuple[Codec, ...] = get_args(Codec)
RELATIVE_CODECS: tuple[RelativeCodec, ...] = get_args(RelativeCodec)
"""Codecs of ULP distances in blocks, which may be compressed. The others store new bits, uncompressed."""
BASE_CODECS: frozenset[Codec] = frozenset({"tiled"})
"""Codecs that can be decoded only with the base bits; versions with them cannot be reverted."""

FEATURES: frozenset[str] = frozenset({*CODECS, "zstd"})
"""What ``requires`` of a document may list for this reader to accept it: codecs, and compression of blocks."""
