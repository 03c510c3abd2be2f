"""The bytes of a run: JSON documents, safetensors files, fingerprints, and the limits a reader enforces.

Bytes and arrays only: no torch, no vLLM, no input or output. May import ``errors``. docs/FORMAT.md is its
specification. Begin with ``manifest``.
"""
