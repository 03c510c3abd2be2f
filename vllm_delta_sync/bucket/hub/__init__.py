"""Buckets of the Hugging Face Hub: ``hf://buckets/NAMESPACE/BUCKET/run``.

Start with ``bucket``; ``api`` sends the Hub's requests, ``xet`` transfers content. Imported only when such a URL is
opened.
"""
