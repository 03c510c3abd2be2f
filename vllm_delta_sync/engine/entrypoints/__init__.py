"""What vLLM and the command line call first: plugins, ``delta-sync serve``, the load format.

May import all of ``engine``. Begin with ``plugin``.
"""
