"""Nothing stays behind: not after the end, a crash, Ctrl-C, or a kill of the lab itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import thinwire
from thinwire.errors import LabError
from thinwire.lab import Lab, Loopback, clean, open_network
from thinwire.lab.counters import parse_counters
from thinwire.lab.linux import namespace_of, processes
from thinwire.lab.network import share_of_cores
from thinwire.lab.run import Run

pytestmark = pytest.mark.lab

PROBE = Path(__file__).parent / "probe.py"
OWN = namespace_of("/proc/self/ns/net")


def lab_processes(holder: int) -> list[int]:
    """Processes that live in a namespace with the mark of the lab of this holder."""
    found = []
    for pid in processes():
        try:
            names = parse_counters(Path(f"/proc/{pid}/net/dev").read_text())
        except OSError:
            continue
        if f"tw{holder}" in names:
            found.append(pid)
    return found


def wait_until(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def cli():
    """Start ``thinwire lab`` as a process of its own; whatever is left of it is ended after the test."""
    started = []

    def start(*arguments):
        code = "import sys, thinwire.cli as cli; cli.COMMANDS = ('lab',); sys.exit(cli.main())"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(Path(thinwire.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def read_until(process, word: str, times: int) -> list[str]:
    lines = []
    while times:
        line = process.stdout.readline()
        assert line, f"ended without {word!r}: {lines}"
        lines.append(line)
        times -= word in line
    return lines


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def holder_of(pid: int) -> int:
    """The child of a lab process that is not a rank: it leads the namespaces, whose names carry its id."""
    return next(child for child in children(pid) if lab_processes(child))


def test_every_rank_gets_torchruns_environment():
    seen = {}
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    with Lab(nodes=2, nproc_per_node=2) as lab:
        run = lab.start(
            [sys.executable, "-c", program],
            env={"MINE": "1"},
            on_line=lambda rank, line: seen.__setitem__(rank, json.loads(line)),
        )
        assert run.wait(30).ok
        interfaces = lab.interfaces
    for rank in range(4):
        got = seen[rank]
        node, local_rank = divmod(rank, 2)
        assert (got["RANK"], got["LOCAL_RANK"], got["NODE_RANK"], got["GROUP_RANK"]) == (
            str(rank), str(local_rank), str(node), str(node),
        )  # fmt: skip
        assert (got["WORLD_SIZE"], got["LOCAL_WORLD_SIZE"], got["MINE"]) == ("4", "2", "1")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "THINWIRE_LAB_INTERFACE"):
            assert got[name] == interfaces[node]
        assert got["MASTER_ADDR"] == seen[0]["MASTER_ADDR"]
        assert int(got["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize("share_cores", [True, False])
def test_every_host_keeps_to_its_share_of_the_cores(share_cores):
    seen = {}
    ours = os.sched_getaffinity(0)
    program = "import os; print(*os.sched_getaffinity(0))"
    with Lab(nodes=2 * len(ours)) as lab:
        run = lab.start(
            [sys.executable, "-c", program],
            on_line=lambda rank, line: seen.__setitem__(rank, {int(word) for word in line.split()}),
            share_cores=share_cores,
        )
        assert run.wait(30).ok
    assert os.sched_getaffinity(0) == ours
    for rank in range(2 * len(ours)):
        assert seen[rank] == ({sorted(ours)[rank % len(ours)]} if share_cores else ours)


def test_a_start_that_fails_halfway_leaves_nothing(monkeypatch):
    """Neither ranks nor file descriptors."""
    started, opened = [], []
    spawn, pidfd_open = Run._spawn, os.pidfd_open

    def noted(command, cwd):
        started.append(spawn(command, cwd))
        return started[-1]

    def failing(pid):
        if len(opened) == 1:
            raise OSError(24, "Too many open files")
        opened.append(pid)
        return pidfd_open(pid)

    monkeypatch.setattr(Run, "_spawn", staticmethod(noted))
    monkeypatch.setattr("thinwire.lab.run.os.pidfd_open", failing)
    network = Loopback(nodes=3)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many open files"):
        network.start([sys.executable, "-c", "import time; time.sleep(60)"])
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    assert set(os.listdir("/proc/self/fd")) == before
    network.close()


def test_shares_of_cores_are_even_or_not_made():
    assert [share_of_cores(node, 4, [3, 5]) for node in range(4)] == [{3}, {5}, {3}, {5}]
    assert [share_of_cores(node, 2, range(8)) for node in range(2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert share_of_cores(0, 3, [0, 1]) is None
    assert share_of_cores(0, 2, [0, 1, 2]) is None


def test_output_is_printed_with_the_ranks_number(capfd):
    with Lab(nodes=2) as lab:
        lab.start([sys.executable, "-c", "import os; print('I am', os.environ['RANK'])"]).wait(30)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1"]


def test_a_crash_ends_the_others_and_is_named():
    with Lab(nodes=3) as lab:
        run = lab.start([sys.executable, PROBE, "fail", "1"], on_line=lambda *_: None, grace_s=0.3)
        result = run.wait(30)
    assert result.failed_rank == 1
    assert result.returncodes == (-signal.SIGTERM, 7, -signal.SIGTERM)
    assert "rank 1 (node 1) exited with status 7" in result.message
    assert result.seconds < 10


def test_a_killed_rank_is_named_and_stubborn_ones_are_killed():
    ready = threading.Semaphore(0)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"
    with Lab(nodes=2) as lab:
        run = lab.start([sys.executable, "-c", program], on_line=lambda *_: ready.release(), grace_s=0.1)
        for _ in range(2):
            assert ready.acquire(timeout=20)
        run.kill(1, signal.SIGKILL)
        result = run.wait(30)
    assert result.failed_rank == 1
    assert "SIGKILL" in result.message
    assert result.returncodes == (-signal.SIGKILL, -signal.SIGKILL)


def test_running_out_of_time_is_told():
    with Lab(nodes=2) as lab:
        result = lab.start([sys.executable, PROBE, "sleep"], on_line=lambda *_: None).wait(0.5)
    assert result.timed_out
    assert not result.ok
    assert result.failed_rank is None
    assert "timed out after 0.5 s" in result.message


def test_closing_ends_grandchildren_in_sessions_of_their_own():
    pids = []
    with Lab(nodes=2) as lab:
        lab.start([sys.executable, PROBE, "tree"], on_line=lambda _, line: pids.append(json.loads(line)))
        wait_until(lambda: len(pids) == 2)
        assert all(map(alive, pids))
    wait_until(lambda: not any(map(alive, pids)))
    with pytest.raises(LabError, match="closed"):
        lab.interface_nbytes()


def test_a_program_that_does_not_exist_is_named():
    lines = []
    with Lab(nodes=1) as lab:
        result = lab.start(["no-such-program"], on_line=lambda _, line: lines.append(line)).wait(30)
    assert result.returncodes == (127,)
    assert "no-such-program" in lines[0]


def test_the_users_own_network_is_not_touched():
    before = Path("/proc/self/net/dev").read_text().count(":")
    with Lab(nodes=2, rate="10mbit"):
        assert Path("/proc/self/net/dev").read_text().count(":") == before
        assert namespace_of("/proc/self/ns/net") == OWN


def test_labs_run_side_by_side(probe):
    with Lab(nodes=2, rate="50mbit"), Lab(nodes=2) as second:
        (seconds,), _ = probe(second, "receive", 1000, 1)
    assert seconds[0] > 0


WITHOUT_ROOT = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""

IN_USER_NAMESPACE = """
import json, os, sys
from thinwire.lab import Lab
lines = []
with Lab(nodes=2, rate="100mbit") as lab:
    run = lab.start([sys.executable, sys.argv[1], "receive", "100000", "2"], on_line=lambda _, line: lines.append(line))
    result = run.wait(30)
    user = []
    lab.start(["id", "-u"], on_line=lambda _, line: user.append(line)).wait(30)
    print(json.dumps([lab.in_user_namespace, result.ok, json.loads(lines[0]), user, os.geteuid()]))
"""


def test_without_root_a_user_namespace_serves():
    """Root without CAP_SYS_ADMIN may make no network namespace of its own, like any other user."""
    environment = {**os.environ, "PYTHONPATH": str(Path(thinwire.__file__).parents[1])}
    command = [sys.executable, "-c", WITHOUT_ROOT, IN_USER_NAMESPACE, str(PROBE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if "sudo" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    in_user_namespace, ok, seconds, user, uid = json.loads(done.stdout)
    assert in_user_namespace
    assert ok
    assert min(seconds) > 0.7 * 8 * 100_000 / 1e8
    assert user == [str(uid)] * 2


def test_ctrl_c_leaves_nothing(cli):
    process = cli("lab", "--nodes", "2", "--rate", "10mbit", "--", PROBE, "tree")
    lines = read_until(process, "[rank", 2)
    pids = [int(line.split()[-1]) for line in lines if line.startswith("[rank")]
    holder = holder_of(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    wait_until(lambda: not alive(holder) and not any(map(alive, pids)))
    assert lab_processes(holder) == []


def test_a_killed_lab_is_cleaned_up_by_its_holder(cli):
    process = cli("lab", "--nodes", "2", "--latency", "1ms", "--", PROBE, "tree")
    read_until(process, "[rank", 2)
    holder = holder_of(process.pid)
    process.kill()
    wait_until(lambda: not alive(holder) and not lab_processes(holder))


def test_clean_ends_what_a_killed_holder_left_and_no_live_lab(cli):
    process = cli("lab", "--nodes", "2", "--", PROBE, "tree")
    read_until(process, "[rank", 2)
    holder = holder_of(process.pid)
    with Lab(nodes=1) as bystander:
        run = bystander.start([sys.executable, PROBE, "sleep"], on_line=lambda *_: None)
        assert len(lab_processes(holder)) >= 4  # two ranks, two grandchildren
        os.kill(process.pid, signal.SIGSTOP)  # so that it cannot tidy up when its holder goes
        os.kill(holder, signal.SIGKILL)
        process.kill()
        process.wait()
        wait_until(lambda: not alive(holder))
        time.sleep(0.5)  # the hub is gone now, and with it the cables
        left = lab_processes(holder)
        assert len(left) >= 4
        assert set(left) <= set(clean())
        wait_until(lambda: not any(map(alive, left)))
        assert run.running


def test_the_command_reports_and_passes_failure_on(cli, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys; print(sys.argv[1:]); sys.exit(3 * (os.environ['RANK'] == '1'))")
    record = tmp_path / "lab.json"
    process = cli("lab", "--nodes", "2", "--grace", "1s", "--json", record, "--", script, "--epochs", "1")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "[rank 0] ['--epochs', '1']" in out
    assert "rank 1 (node 1) exited with status 3" in out
    assert "node 0 sent 0 bytes" in out
    got = json.loads(record.read_text())
    assert (got["schema"], got["returncodes"], got["failed_rank"]) == (1, [0, 3], 1)


def test_open_network_prefers_the_lab():
    with open_network(nodes=2, rate="10mbit") as network:
        assert network.emulated
        assert network.reason is None


def test_loopback_has_the_same_interface(probe):
    with Loopback(nodes=2, reason="a test") as network:
        assert not network.emulated
        (seconds,), result = probe(network, "receive", 1000, 1)
        assert len(result.sent_nbytes) == 2
        assert seconds[0] > 0
        with pytest.raises(LabError, match="a test"):
            network.set_rate("10mbit")
