"""Three vLLM servers and more that follow a trainer over slow links, measured beside sending full weights.

Run it with ``python -m examples.fleet`` (or ``make example-fleet``); see ``--help``.
"""
