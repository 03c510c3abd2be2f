"""Buckets of the Hugging Face Hub: ``hf://buckets/NAMESPACE/BUCKET/run``.

Imported only when such a URL is opened. Begin with ``bucket``; ``api`` holds the Hub's requests, ``xet`` its transfers.
"""
