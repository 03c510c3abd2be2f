"""One server, hundreds of versions, and no peace: ``python -m tests.tools.soak``, or ``make soak``.

A real trainer publishes, a real server follows under load, and meanwhile it is rolled back, held, sent to versions, and
killed. Afterwards the tokens of every span of every finished answer are computed anew, with the weights of the version
that the span names as the bucket has them, and compared with the server's log probabilities; so are the two versions
beside it, to show that a wrong one would have been noticed. The server's memory has to stay flat.
"""
