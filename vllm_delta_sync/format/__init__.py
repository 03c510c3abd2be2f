"""The bytes of a run: JSON documents, safetensors files, fingerprints, and the limits a reader enforces.

Bytes and arrays only: no torch, no vLLM; only ``safetensors_file`` writes to disk. May import ``errors``.
docs/FORMAT.md is the specification. Begin with ``manifest``.
"""
