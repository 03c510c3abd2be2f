"""A fuzzer of delta objects: files are changed at random, also inside compressed planes, and must be read or refused.

    make fuzz                             100,000 inputs, loops compiled with checks of all bounds
    python -m tests.tools.fuzz --inputs 1000    fewer

``corpus/`` holds the files it starts from and one input for each way in which one was refused.
"""
