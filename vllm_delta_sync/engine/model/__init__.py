"""How a vLLM model holds the checkpoint: which element of which tensor lies where in a rank's memory.

``loader_trace`` watches the model's own loader, ``route_compiler`` makes routes of what it saw, and ``route_map`` holds
them; what a loader computes is loaded again by ``reload_units``. May import no other package of ``engine``. Begin with
``route_map``.
"""
