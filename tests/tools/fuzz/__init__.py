"""Random campaigns: damaged delta objects, and new examples of the properties that tests state.

    make fuzz                                     twenty minutes
    make fuzz FUZZ_FLAGS="--minutes 600"          as long as you like
    python -m tests.tools.fuzz --help             all flags

Each campaign has new seeds, prints them, and prints the command that repeats a failure exactly. ``objects`` changes
delta objects at random, also inside compressed planes, and has them read or refused by loops with checks of all bounds;
``corpus/`` holds the files it starts from and one input for each way in which one was refused. ``properties`` runs the
tests that draw with Hypothesis, state machines included, again and again.
"""
