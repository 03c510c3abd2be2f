"""Apply a staged patch on all ranks or on none, and revert it.

``transaction`` runs on the controller: pause, commit, compare fingerprints, confirm or revert, resume. ``apply`` runs
on each rank. May import ``engine.model`` and ``engine.compat``. Begin with ``transaction``.
"""
