import errno
import os
import socket

import pytest

from thinwire.lab.ports import reserve_port


def test_a_reserved_port_is_nobodys_by_chance():
    port = reserve_port()
    # A socket without SO_REUSEADDR may not have it, as no connection out and nobody who asks for any port.
    with socket.socket() as other, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("", port)) as listener:
        assert listener.getsockname()[1] == port
