"""``needs_ipv6`` skips tests on a machine whose kernel has no IPv6."""

import socket

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this kernel has no IPv6")
