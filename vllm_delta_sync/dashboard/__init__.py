"""The page for people who run servers: one JSON document (``overview``), one HTML file that shows it (``page``).

May import ``maintenance`` and the packages below it. Start with ``overview``; the vLLM server, ``delta-sync dashboard``
and ``delta-sync report`` all use it.
"""
