"""The ports that HTTP servers answer on."""

import socket

from opentinker.errors import UnavailableError


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """(a bound socket, its address as `http://host:port`). Port 0 is a free one.

    Raises:
        UnavailableError: the port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    name = f"[{host}]" if family == socket.AF_INET6 else host
    return bound, f"http://{name}:{bound.getsockname()[1]}"
