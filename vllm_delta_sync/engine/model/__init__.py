"""How a vLLM model holds the checkpoint: where each element of each tensor lies in a rank's memory.

``loader_trace`` records what the model's own loader does, ``route_compiler`` turns that record into routes, and
``route_map`` holds the routes. ``reload_units`` reloads what a loader computes instead of copying. May import no other
package of ``engine``. Begin with ``route_map``.
"""
