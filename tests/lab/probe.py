"""What the ranks of the lab's tests run: plain sockets, one JSON line of results from rank 0.

probe.py receive NBYTES REPEATS [SENDERS]   rank 0 times what the others send it
probe.py send NBYTES                        the same, one sender, rank 0 sends
probe.py rtt NUM                            rank 1 answers rank 0, one byte each way
probe.py stream NUM                         rank 1 sends, rank 0 prints the rates of so many half seconds
probe.py tree                               leave a grandchild in a session of its own, print its id, sleep
probe.py fail RANK                          this rank exits with status 7, the others sleep
probe.py sleep
"""

import json
import os
import socket
import subprocess
import sys
import time

RANK = int(os.environ["RANK"])
HERE = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def serve(num_peers: int) -> list[socket.socket]:
    with socket.create_server(HERE, backlog=num_peers) as server:
        peers = [server.accept()[0] for _ in range(num_peers)]
    for peer in peers:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peers


def connect() -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            peer = socket.create_connection(HERE, timeout=20)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer


def read_exactly(peer: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(peer.recv(min(nbytes, 1 << 20))) or sys.exit("the peer closed")


def receive(nbytes: int, repeats: int, senders: int) -> None:
    if RANK == 0:
        peers = serve(senders)
        seconds = []
        for _ in range(repeats):
            time.sleep(0.2)  # the links are idle, their buckets full
            start = time.perf_counter()
            for peer in peers:
                peer.sendall(b"g")
            for peer in peers:
                read_exactly(peer, nbytes)
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds))
    elif senders >= RANK:
        peer = connect()
        for _ in range(repeats):
            read_exactly(peer, 1)
            peer.sendall(bytes(nbytes))


def send(nbytes: int) -> None:
    if RANK == 0:
        (peer,) = serve(1)
        start = time.perf_counter()
        peer.sendall(bytes(nbytes))
        read_exactly(peer, 1)
        print(json.dumps([time.perf_counter() - start]))
    elif RANK == 1:
        peer = connect()
        read_exactly(peer, nbytes)
        peer.sendall(b"d")


def rtt(num: int) -> None:
    if RANK == 0:
        (peer,) = serve(1)
        seconds = []
        for _ in range(num):
            start = time.perf_counter()
            peer.sendall(b"p")
            read_exactly(peer, 1)
            seconds.append(time.perf_counter() - start)
            time.sleep(0.01)
        print(json.dumps(seconds))
    elif RANK == 1:
        peer = connect()
        for _ in range(num):
            read_exactly(peer, 1)
            peer.sendall(b"p")


def stream(num: int) -> None:
    if RANK == 0:
        (peer,) = serve(1)
        for _ in range(num):
            start, nbytes = time.monotonic(), 0
            while time.monotonic() < start + 0.5:
                nbytes += len(peer.recv(1 << 16))
            print(json.dumps(8 * nbytes / (time.monotonic() - start)), flush=True)
        os._exit(0)
    elif RANK == 1:
        peer = connect()
        try:
            while True:
                peer.sendall(bytes(1 << 14))
        except OSError:
            pass


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "receive":
        receive(int(rest[0]), int(rest[1]), int(rest[2]) if len(rest) > 2 else 1)
    elif what == "send":
        send(int(rest[0]))
    elif what == "rtt":
        rtt(int(rest[0]))
    elif what == "stream":
        stream(int(rest[0]))
    elif what == "tree":
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print(json.dumps(child.pid))
        time.sleep(60)
    elif what == "fail":
        if int(rest[0]) == RANK:
            sys.exit(7)
        time.sleep(60)
    elif what == "sleep":
        print("ready")
        time.sleep(60)
    else:
        sys.exit(f"unknown: {what}")


if __name__ == "__main__":
    main()
