"""The connections between ranks: what moves over them, who is let in, and how rounds end that cannot go on."""

import contextlib
import datetime
import gc
import os
import signal
import socket
import struct
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Tower, attached, seeded, stop_here, train

from thinwire.comm import meeting
from thinwire.comm import mesh as mesh_module
from thinwire.comm.meeting import Hello
from thinwire.comm.mesh import PIECES_NBYTES, Mesh, MeshClosedError, MeshError, agree_on_pieces
from thinwire.comm.process_group import own_store, perform
from thinwire.comm.rounds import AllGather, AllToAll, SendRecv, Transfer
from thinwire.errors import AttachError, ScheduleError
from thinwire.kernels import backend

pytestmark = pytest.mark.skipif(backend() != "native", reason="meshes need the compiled module")

HEADER = struct.Struct("<4sIQ")


def _mesh(rank, world_size, timeout=20.0):
    store = own_store(range(world_size), rank)
    return Mesh(store, range(world_size), rank, datetime.timedelta(seconds=timeout), "test")


def _block(source, target, nbytes, turn=0):
    generator = torch.Generator().manual_seed(1000 * turn + 10 * source + target)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _round(mesh, kind, nbytes, turn=0, group=None):
    """Do one round of blocks that tell their way, and return whether all came as they were sent."""
    rank, world_size = mesh.rank, mesh.world_size
    if kind is AllToAll:
        send = torch.cat([_block(rank, target, nbytes[target], turn) for target in range(world_size)])
        expected = torch.cat([_block(source, rank, nbytes[rank], turn) for source in range(world_size)])
    else:
        send = _block(rank, 0, nbytes[rank], turn)
        expected = torch.cat([_block(source, 0, nbytes[source], turn) for source in range(world_size)])
    receive = torch.empty(expected.numel(), dtype=torch.uint8)
    perform(Transfer(kind(tuple(nbytes)), send, receive), group or dist.group.WORLD, mesh)
    return torch.equal(receive, expected)


# --- what moves -----------------------------------------------------------------------------------------------------

SIZES = [
    [0, 0, 0, 0, 0],
    [1, 0, 7, 0, 3],
    [0, 70_000, 16, 200_001, 1],
    [300_000, 300_000, 300_000, 300_000, 300_000],
    [24_575, 24_576, 49_153, 16_384, 40_960],  # around the ends of pieces of 16 KiB, and where a last one may be longer
    [12_287, 12_288, 12_289, 8_192, 28_673],  # the same for 8 KiB
    [49_151, 49_152, 49_153, 32_768, 98_305],  # and for 32
]


def _all_sizes(rank, world_size):
    mesh = _mesh(rank, world_size)
    arrived = []
    for turn, mesh.piece_nbytes in enumerate((*PIECES_NBYTES, 1000)):
        arrived += [_round(mesh, kind, sizes[:world_size], turn) for sizes in SIZES for kind in (AllToAll, AllGather)]
    mesh.close()
    return all(arrived)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_blocks_of_all_sizes_arrive(ranks, world_size):
    assert ranks(world_size).run(_all_sizes) == [True] * world_size


def _large(rank, world_size):
    mesh = _mesh(rank, world_size)
    arrived = _round(mesh, AllToAll, [8 << 20] * world_size) and _round(mesh, AllGather, [8 << 20] * world_size)
    mesh.close()
    return arrived


def test_blocks_larger_than_all_buffers_cross(ranks):
    assert ranks(4).run(_large) == [True] * 4


def _late(rank, world_size):
    mesh = _mesh(rank, world_size)
    arrived = []
    for turn in range(world_size):
        if rank == turn:
            time.sleep(0.3)
        arrived.append(_round(mesh, AllToAll, [1 << 20] * world_size, turn))
    mesh.close()
    return all(arrived)


def test_ranks_may_come_late(ranks):
    assert ranks(3).run(_late) == [True] * 3


def _agreed(rank, world_size, slow, piece_s):
    """Agree on the size of pieces with a rank whose wire seems slow, and return what this rank then uses."""
    store = own_store(range(world_size), rank)
    meshes = [
        Mesh(dist.PrefixStore(name, store), range(world_size), rank, datetime.timedelta(seconds=20), name)
        for name in ("first", "second")
    ]
    exchange = meshes[0].exchange

    def slowly(*blocks):
        exchange(*blocks)
        time.sleep(0.5 if rank == slow else 0)

    meshes[0].exchange = slowly
    for mesh in meshes:
        mesh.piece_nbytes = 12_345
    usual, mesh_module.PIECE_S = mesh_module.PIECE_S, piece_s
    try:
        agree_on_pieces(meshes, store)
    finally:
        mesh_module.PIECE_S = usual
    sizes = {mesh.piece_nbytes for mesh in meshes}
    meshes[0].exchange = exchange
    arrived = all(_round(mesh, AllToAll, [100_000] * world_size) for mesh in meshes)
    for mesh in meshes:
        mesh.close()
    return sizes, arrived


# 96 KiB in half a second and a little are at most 196,608 bytes a second.
@pytest.mark.parametrize(
    ("slow", "piece_s", "nbytes"), [(1, 4e-3, 8192), (1, 0.16, 16384), (None, 1e9, 32768), (None, 0.0, 8192)]
)
def test_pieces_suit_the_slowest_wire_on_all_ranks(ranks, slow, piece_s, nbytes):
    assert ranks(4).run(_agreed, slow, piece_s) == [({nbytes}, True)] * 4


def _attached_pieces(rank, world_size):
    with attached(DDP(seeded(Tower), bucket_cap_mb=0.02), "int8") as link:
        return [lane.mesh.piece_nbytes for lanes in link._driver._lanes for lane in lanes]


def test_all_lanes_of_all_ranks_have_one_size_of_pieces(ranks):
    sizes = ranks(3).run(_attached_pieces)
    assert len({size for lanes in sizes for size in lanes}) == 1
    assert sizes[0][0] in PIECES_NBYTES


def _wrong_buffers(rank, world_size):
    mesh = _mesh(rank, world_size)
    good = torch.zeros(8, dtype=torch.uint8)
    for send, receive in [(good[:4], good), (good, good[:4]), (good.repeat(2)[::2], good)]:
        with pytest.raises(ScheduleError, match=r"expected .* bytes in contiguous buffers"):
            perform(Transfer(AllToAll((4, 4)), send, receive), dist.group.WORLD, mesh)
    mesh.close()


def test_buffers_that_do_not_fit_are_refused(ranks):
    ranks(2).run(_wrong_buffers)


def _wrong_moves(rank, world_size):
    mesh = _mesh(rank, world_size)
    moves = SendRecv(((0, 1, 2, 6), (1, 0, 0, 4)), world_size)
    good, receive = torch.zeros(6, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    short = torch.zeros(5 if rank == 0 else 3, dtype=torch.uint8)
    for transport in (mesh, None):
        for send, into in [(short, receive), (good, receive[:3]), (good, good)]:
            with pytest.raises(ScheduleError, match=r"bytes to send and 4 to receive into"):
                perform(Transfer(moves, send, into), dist.group.WORLD, transport)
        send, into = torch.arange(6, dtype=torch.uint8) + 10 * rank, receive.clone()
        perform(Transfer(moves, send, into), dist.group.WORLD, transport)
        assert into.tolist() == ([10, 11, 12, 13] if rank == 0 else [2, 3, 4, 5])
    mesh.close()


def test_moves_go_where_they_are_told_and_never_beyond_a_buffer(ranks):
    ranks(2).run(_wrong_moves)


def _transport(rank, world_size, recipe, transport):
    os.environ["THINWIRE_TRANSPORT"] = transport
    try:
        model = DDP(seeded(Tower), bucket_cap_mb=0.02)
        with attached(model, recipe) as link:
            meshes = [lane.mesh for lanes in link._driver._lanes for lane in lanes]
            return {mesh is not None for mesh in meshes}, train(model, rank, range(4))
    finally:
        del os.environ["THINWIRE_TRANSPORT"]


@pytest.mark.parametrize("recipe", ["int8", "int4", "gather/onebit", {"*.bias": "dense", "*": "topk:0.1"}], ids=str)
def test_mesh_and_gloo_give_the_same_bits(ranks, recipe):
    over_mesh = ranks(3).run(_transport, recipe, "mesh")
    over_gloo = ranks(3).run(_transport, recipe, "gloo")
    assert [used for used, _ in over_mesh] == [{True}] * 3
    assert [used for used, _ in over_gloo] == [{False}] * 3
    assert len({bits for _, bits in over_mesh + over_gloo}) == 1


def _one_without(rank, world_size):
    if rank == 1:
        os.environ["THINWIRE_KERNELS"] = "reference"
    try:
        model = DDP(seeded(Tower), bucket_cap_mb=0.02)
        with attached(model, "int8") as link:
            return [lane.mesh for lanes in link._driver._lanes for lane in lanes], train(model, rank, range(3))
    finally:
        os.environ.pop("THINWIRE_KERNELS", None)


def test_one_rank_without_the_compiled_module_takes_all_to_gloo(ranks):
    results = ranks(3).run(_one_without)
    assert all(meshes == [None] * len(meshes) for meshes, _ in results)
    assert len({bits for _, bits in results}) == 1


# --- who is let in --------------------------------------------------------------------------------------------------


def _address(store):
    """Wait for where rank 0 listens."""
    port, address = store.get("address/0").decode().split(" ", 1)
    return address, int(port)


def _with_strangers(rank, world_size, strangers):
    """Rank 1 comes once strangers have knocked at rank 0's door."""
    store = own_store(range(world_size), rank)
    open_ones = []
    if rank == 1:
        for says in strangers:
            knocking = socket.create_connection(_address(store))
            knocking.sendall(says)
            open_ones.append(knocking)
        time.sleep(0.2)
    mesh = Mesh(store, range(world_size), rank, datetime.timedelta(seconds=20), "test")
    arrived = _round(mesh, AllToAll, [1000] * world_size)
    mesh.close()
    for knocking in open_ones:
        knocking.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert knocking.recv(100) == b"", "a stranger was answered"
        knocking.close()
    return arrived


def test_strangers_are_turned_away(ranks):
    strangers = [
        b"",
        b"GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: */*\r\nUser-Agent: curious\r\n\r\n",
        b"thin",
        Hello(1, b"test", b"0" * 16).pack(),
        os.urandom(1000),
    ]
    assert ranks(2).run(_with_strangers, strangers) == [True] * 2


def _another_version(rank, world_size):
    if rank == 1:
        Hello.__init__.__defaults__ = (99,)
    try:
        with pytest.raises(AttachError) as caught:
            _mesh(rank, world_size)
        return str(caught.value)
    finally:
        Hello.__init__.__defaults__ = (meeting.WIRE_FORMAT,)


def test_another_wire_format_is_an_error_on_both_sides(ranks):
    first, second = ranks(2).run(_another_version)
    assert "from rank 1, got 99 on 'test'" in first
    assert "rank 0 turned this rank's connection away" in second or "another rank could not connect" in second


def _absent(rank, world_size):
    if rank == 2:
        time.sleep(3)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(AttachError) as caught:
        _mesh(rank, world_size, timeout=1.5)
    return str(caught.value), time.monotonic() - started


def test_a_rank_that_does_not_come_is_named(ranks):
    for message, seconds in ranks(3).run(_absent)[:2]:
        assert "rank 2 did not connect within 1.5 s" in message
        assert seconds < 6


def _interface(rank, world_size):
    os.environ["THINWIRE_SOCKET_IFNAME"] = "nonesuch0"
    try:
        with pytest.raises(AttachError, match=r"THINWIRE_SOCKET_IFNAME: .*'nonesuch0'; there are .*lo"):
            _mesh(rank, world_size)
    finally:
        del os.environ["THINWIRE_SOCKET_IFNAME"]


def test_an_unknown_interface_is_named(ranks):
    ranks(2).run(_interface)


# --- rounds that cannot go on ---------------------------------------------------------------------------------------


def _failing(mesh, nbytes=1 << 20):
    """Do rounds until one fails; return the error and the seconds it took."""
    for turn in range(1000):
        started = time.monotonic()
        try:
            assert _round(mesh, AllToAll, [nbytes] * mesh.world_size, turn)
        except MeshError as error:
            with pytest.raises(MeshClosedError):
                _round(mesh, AllToAll, [nbytes] * mesh.world_size)
            return str(error), time.monotonic() - started
    raise AssertionError("it never failed")


def _killed(rank, world_size, folder, how):
    mesh = _mesh(rank, world_size, timeout=2.0)
    if rank == 1:
        assert _round(mesh, AllToAll, [1 << 20] * world_size)
        half = torch.zeros(10_000, dtype=torch.uint8)
        os.write(mesh._fds[0], HEADER.pack(b"TWBK", 1, 1 << 20) + half.numpy().tobytes())
        if how == signal.SIGSTOP:
            stop_here()
        os.kill(os.getpid(), how)
    message, seconds = _failing(mesh)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"{seconds}\n{message}")


@pytest.mark.parametrize(("how", "world_size"), [(signal.SIGKILL, 2), (signal.SIGKILL, 3), (signal.SIGSTOP, 3)])
def test_a_peer_that_is_killed_or_stopped_in_the_middle(ranks, tmp_path, how, world_size):
    outcomes = ranks(world_size).outcomes(_killed, str(tmp_path), how, timeout=25, store="tcp", grace=20)
    for rank in {0, 1, 2} & set(range(world_size)) - {1}:
        assert (tmp_path / str(rank)).exists(), outcomes[rank].error
        seconds, message = (tmp_path / str(rank)).read_text().split("\n", 1)
        assert float(seconds) < 5
        if how == signal.SIGSTOP:
            assert "rank 1: timed out: nothing moved for 2 s" in message
        elif rank == 0:
            assert "rank 1: closed the connection" in message or "rank 1: Connection reset" in message


BAD = {
    "round": (HEADER.pack(b"TWBK", 7, 100), "rank 1: sent block 7 of 100 bytes, expected block 0 of 100 bytes"),
    "size": (HEADER.pack(b"TWBK", 0, 101), "rank 1: sent block 0 of 101 bytes, expected block 0 of 100 bytes"),
    "magic": (HEADER.pack(b"HTTP", 0, 100), "rank 1: sent bytes that are no block header"),
}


def _mismatch(rank, world_size, bad):
    mesh = _mesh(rank, world_size)
    message = ""
    if rank == 1:
        os.write(mesh._fds[0], BAD[bad][0] + bytes(100))
    else:
        message, _ = _failing(mesh, 100)
    dist.barrier()
    mesh.close()
    return message


@pytest.mark.parametrize("bad", BAD)
def test_headers_that_do_not_match(ranks, bad):
    assert BAD[bad][1] in ranks(2).run(_mismatch, bad)[0]


def _unequal_rounds(rank, world_size):
    mesh = _mesh(rank, world_size)
    with pytest.raises(MeshError) as caught:
        _round(mesh, AllToAll, [100 + rank] * world_size)
    dist.barrier()
    mesh.close()
    return str(caught.value)


def test_ranks_that_disagree_on_sizes(ranks):
    messages = ranks(2).run(_unequal_rounds)
    assert "rank 1: sent block 0 of 101 bytes, expected block 0 of 100 bytes" in messages[0]
    assert "rank 0: sent block 0 of 100 bytes, expected block 0 of 101 bytes" in messages[1]


def _ended_here(rank, world_size, how):
    mesh = _mesh(rank, world_size)
    seconds = 0.0
    if rank == 0:
        threading.Timer(0.3, getattr(mesh, how)).start()
        started = time.monotonic()
        with pytest.raises(MeshClosedError):
            _round(mesh, AllToAll, [1 << 20] * world_size)
        seconds = time.monotonic() - started
    dist.barrier()
    mesh.close()
    mesh.close()
    with pytest.raises(MeshClosedError):
        _round(mesh, AllToAll, [1] * world_size)
    return seconds


@pytest.mark.parametrize("how", ["interrupt", "close"])
def test_another_thread_ends_a_round(ranks, how):
    assert ranks(3).run(_ended_here, how)[0] < 3


# --- nothing is left ------------------------------------------------------------------------------------------------


def _left_behind(rank, world_size):
    counts = []
    for _ in range(4):
        model = DDP(seeded(Tower, 16, 2))
        with attached(model, "int8"):
            train(model, rank, range(2), width=16)
        del model
        gc.collect()
        dist.barrier()
        time.sleep(0.2)
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    mesh = _mesh(rank, world_size)
    fds = list(mesh._fds)
    del mesh
    for fd in fds:
        if fd >= 0:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
    return counts


def test_no_descriptors_or_threads_are_left(ranks):
    for counts in ranks(3).run(_left_behind):
        assert counts[1] == counts[2] == counts[3], counts
