"""Prove the device path on a machine with a GPU: ``make test-gpu``.

``modules.py`` checks commits, staging, proofs and comparisons on plain modules, with torch and Triton alone;
``served.py`` checks real vLLM servers; ``report.py`` keeps what came of each check and writes docs/gpu.md.
"""
