"""A free port that stays free until a rank listens on it."""

import socket


def reserve_port() -> int:
    """Return a port of 127.0.0.1 that the system gives to nobody who does not ask for it by number.

    For about a minute. A port that was only looked up is free for all again, and on a busy machine the next connection
    out may get it. This one has had a connection that its own side closed first, so it is in TIME_WAIT: choosing a port
    by itself the system passes it over, and who asks for it with ``SO_REUSEADDR``, as torch's store and ZeroMQ do, gets
    it.

    >>> port = reserve_port()
    >>> with socket.create_server(("127.0.0.1", port)) as listener:  # sets SO_REUSEADDR
    ...     listener.getsockname()[1] == port
    True
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        port: int = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            listener.accept()[0].close()
            caller.recv(1)  # b"": theirs is closed, and was first
    return port
