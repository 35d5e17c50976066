"""`thinwire server` and `thinwire keys`, as processes."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import thinwire.server.launch
from thinwire.cli import main
from thinwire.errors import ServerError
from thinwire.lab.ports import reserve_port
from thinwire.server.cpus import format_cpus, parse_cpus, share_out
from thinwire.server.launch import Launch

FIRST = str(min(os.sched_getaffinity(0)))


def _thinwire(*arguments):
    command = [sys.executable, "-m", "thinwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def _status(arguments):
    try:
        return main(arguments)
    except SystemExit as left:  # argparse
        return left.code


def test_metrics_and_a_status_line():
    command = ["server", "--bind", "tcp://127.0.0.1:0", "--num-workers", "2", "--metrics", "0", "--status", "0.1"]
    command += ["--cpu-affinity", FIRST]
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        started = server.stdout.readline()
        assert re.fullmatch(rf"server 0 of 1 for 2 workers on processors {FIRST} at tcp://127.0.0.1:\d+\n", started)
        assert os.sched_getaffinity(server.pid) == {int(FIRST)}
        url = server.stdout.readline().removeprefix("metrics at ").strip()
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        for line in ("thinwire_server_rounds_total 0.0", 'thinwire_server_worker_clock{rank="1"} -1.0'):
            assert line in text
        assert server.stderr.readline().startswith("0 of 2 workers; 0 rounds/s, 0.0 MB/s pushed")
        server.terminate()
        assert server.wait(20) == 0
        assert "served 0 rounds" in server.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--bind", "tcp://0.0.0.0:5555"], 1, "expected keys, since others than this machine can reach it"),
        (["--bind", "127.0.0.1:5555"], 1, "expected an address such as tcp://10.0.0.1:5555"),
        (["--bind", "tcp://127.0.0.1:0", "--keys", "/nowhere"], 1, "expected a key in /nowhere/server.secret"),
        (["--bind", "tcp://127.0.0.1:0", "--cpu-affinity", "4000"], 1, "which this process may use, got 4000"),
        (["--bind", "tcp://127.0.0.1:0", "--cpu-affinity", FIRST + ",4000"], 1, "got 4000 among others"),
        (["--bind", "tcp://127.0.0.1:0", "--cpu-affinity", "0-"], 2, "expected processors such as 0,2-5"),
        (["--bind", "tcp://127.0.0.1:0", "--server-index", "2/2"], 2, "expected which of how many servers"),
        (["--bind", "tcp://127.0.0.1:0", "--metrics", "0.0.0.0"], 2, "expected a port, such as 9100, or HOST:PORT"),
        (["--bind", "tcp://127.0.0.1:0", "--metrics", "192.0.2.1:0"], 1, "expected a free port at an address of this"),
        (["--bind", "tcp://127.0.0.1:0", "--grace", "-1"], 2, "expected a number from 0 on"),
    ],
)
def test_what_is_wrong_is_said(arguments, status, message, capsys):
    assert _status(["server", "--num-workers", "2", *arguments]) == status
    assert message in capsys.readouterr().err


def test_keys_are_made_once(tmp_path, capsys):
    assert main(["keys", str(tmp_path / "keys")]) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "keys/server/server.public",
        "keys/server/server.secret",
        "keys/server/worker.public",
        "keys/worker/server.public",
        "keys/worker/worker.public",
        "keys/worker/worker.secret",
    ]
    assert main(["keys", str(tmp_path / "keys")]) == 1
    assert "expected no keys there" in capsys.readouterr().err


def test_a_server_alone_is_measured(capsys):
    arguments = ["bench", "server", "--workers", "2", "--mb", "0.5", "--recipes", "onebit,int8", "--json", "-"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in document["rows"]] == ["onebit", "int8"]
    for row in document["rows"]:
        assert row["gb_per_s"] > 0
        assert row["floor_ratio"] == row["gb_per_s"] / row["floor_gb_per_s"]
        assert row["pushed_nbytes"] < row["nbytes"] / 3


def test_launch_starts_servers_and_workers_and_ends_them():
    port = str(reserve_port())
    example = str(Path(__file__).parents[2] / "examples/train_with_servers.py")
    where = [
        "--servers-per-node",
        "1",
        "--nproc-per-node",
        "2",
        "--port",
        port,
        "--master-port",
        str(reserve_port()),
    ]
    done = _thinwire("launch", *where, example)
    assert done.returncode == 0, done.stderr
    assert f"server 0 of 1 for 2 workers at tcp://127.0.0.1:{port}" in done.stdout
    assert "bytes sent per step and worker" in done.stdout
    assert "served " in done.stderr


def test_launch_on_other_machines_needs_keys(capsys):
    assert main(["launch", "--nproc-per-node", "2", "--hosts", "10.0.0.1,10.0.0.2", "train.py"]) == 1
    assert "expected a folder made by  thinwire keys FOLDER" in capsys.readouterr().err


def test_servers_are_numbered_node_after_node(tmp_path):
    launch = Launch(
        hosts=("a", "b"),
        node_rank=1,
        servers_per_node=2,
        nproc_per_node=4,
        port=5555,
        master_port=29500,
        keys=tmp_path,
        server_arguments=(),
        script=("train.py", "--lr", "1"),
    )
    assert launch.addresses() == ["tcp://a:5555", "tcp://a:5556", "tcp://b:5555", "tcp://b:5556"]
    commands = [" ".join(command[1:]) for command in launch.server_commands()]
    keys = f"--threads 1 --keys {tmp_path}/server --grace 60.0"
    assert commands == [
        f"-m thinwire server --bind tcp://0.0.0.0:{port} --num-workers 8 --server-index {index}/4 {keys}"
        for port, index in ((5555, 2), (5556, 3))
    ]
    assert launch.worker_command()[-3:] == ["train.py", "--lr", "1"]
    assert launch.environment()["THINWIRE_KEYS"] == f"{tmp_path}/worker"


def test_processors_are_shared_out_and_none_twice():
    for num, servers, threads, workers, share in ((16, 2, 1, 4, 2), (7, 2, 2, 3, 2), (64, 2, 4, 8, 3), (5, 0, 1, 4, 1)):
        cpus = set(range(1, 2 * num, 2))
        of_servers, of_workers = share_out(cpus, servers=servers, threads=threads, workers=workers, leader_share=share)
        dealt = [cpu for each in (*of_servers, *of_workers) for cpu in each]
        assert sorted(dealt) == sorted(cpus)
        assert [len(each) for each in of_servers] == [threads] * servers
        leader, *others = map(len, of_workers)
        assert len(set(others)) == 1
        assert leader >= share * others[0] or others[0] == 1
    with pytest.raises(ServerError, match=r"expected at least 6 processors, .* 2 servers, got 5: 0-4"):
        share_out(range(5), servers=2, threads=1, workers=4, leader_share=2)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_sets_of_processors_are_written_as_they_are_read(cpus):
    assert parse_cpus(format_cpus(cpus)) == cpus


def test_a_worker_takes_the_set_of_its_local_rank():
    pin, show = Path(thinwire.server.launch.__file__).with_name("pin.py"), "import os, sys; print(sys.argv, "
    show += "os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    for threads, expected in (("own", "1"), ("kept", "7")):
        done = subprocess.run(
            [sys.executable, str(pin), f"4000:{FIRST}", threads, "-c", show, "--lr"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "LOCAL_RANK": "1", "OMP_NUM_THREADS": "7"},
        )
        assert done.stdout == f"['-c', '--lr'] {{{FIRST}}} {expected}\n"


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_launch_pins_servers_and_workers(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nprint('here', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], sys.argv[1:])\n"
    )
    first, second, *_ = sorted(os.sched_getaffinity(0))
    where = ["--servers-per-node", "1", "--nproc-per-node", "1"]
    where += ["--port", str(reserve_port()), "--master-port", str(reserve_port())]
    done = _thinwire("launch", *where, "--cpu-affinity", f"{first},{second}", str(script), "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert f"processors of this node: worker 0: {first}; server 0: {second}" in done.stdout
    assert f"here [{first}] 1 ['--lr', '1']" in done.stdout


def test_launch_with_too_few_processors(capsys):
    arguments = ["launch", "--nproc-per-node", "4000", "--cpu-affinity", "all", "train.py"]
    assert main(arguments) == 1
    assert "one for each worker and each thread of 2 servers" in capsys.readouterr().err
    assert main(["launch", "--nproc-per-node", "1", "--cpu-affinity", "4000", "train.py"]) == 1
    assert "which this process may use, got 4000" in capsys.readouterr().err
