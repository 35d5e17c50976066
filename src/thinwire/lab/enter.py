"""Launcher: enter a node's namespaces, then become the program."""

import json
import os
import sys

from thinwire.lab.linux import CLONE_NEWNET, CLONE_NEWUSER, setns


def main(user_namespace: str, network_namespace: str, argv: str) -> None:
    """Enter the namespaces (JSON: ``/proc`` paths, the user namespace or null) and exec ``argv`` (JSON list)."""
    # The user namespace first: it gives the right to enter the network namespace. The capabilities it brings are
    # dropped by exec, since the user id stays what it was.
    for path, kind in ((user_namespace, CLONE_NEWUSER), (network_namespace, CLONE_NEWNET)):
        path = json.loads(path)
        if path is not None:
            fd = os.open(path, os.O_RDONLY)
            setns(fd, kind)
            os.close(fd)
    program = json.loads(argv)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"thinwire lab: cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
