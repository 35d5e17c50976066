"""`thinwire launch`: what it leaves behind when it is ended from outside, and two nodes of it on one machine."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from thinwire.cli import launch as cli_launch
from thinwire.cli import main, server
from thinwire.cli.server import option_arguments
from thinwire.lab.ports import reserve_port
from thinwire.server.launch import Launch

MARK = "THINWIRE_TEST"  # in the environment of a launch, and so of all that it starts


def parse_launch(arguments):
    parser = argparse.ArgumentParser()
    cli_launch.add_parser(parser.add_subparsers())
    return parser.parse_args(arguments)


def _marked(mark):
    """Return the processes that carry this mark, with their commands."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def _wait_for(what, seconds):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextlib.contextmanager
def _launched(mark, *arguments, **kwargs):
    command = [sys.executable, "-m", "thinwire", "launch", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, MARK: mark}, **kwargs
    ) as launch:
        try:
            yield launch
        finally:
            for pid in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's /proc")
@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGTERM, os.kill),
        pytest.param(signal.SIGHUP, os.kill, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, os.kill, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, os.killpg, marks=pytest.mark.slow, id="Ctrl-C"),  # a terminal tells the group
    ],
)
def test_a_launch_that_is_signalled_or_killed_leaves_nothing_behind(tmp_path, number, send):
    script, mark = tmp_path / "train.py", uuid.uuid4().hex
    script.write_text(f"import pathlib, time\npathlib.Path({str(tmp_path / 'running')!r}).touch()\ntime.sleep(600)\n")
    where = ["--servers-per-node", "1", "--nproc-per-node", "1"]
    where += ["--port", str(reserve_port()), "--master-port", str(reserve_port())]
    with _launched(mark, *where, str(script), start_new_session=True) as launch:
        _wait_for((tmp_path / "running").exists, 60)
        commands = "\n".join(_marked(mark).values())
        assert all(what in commands for what in ("thinwire server", "torch.distributed.run", "train.py"))
        send(launch.pid, number)
        _wait_for(lambda: not _marked(mark), 50)
        assert launch.wait() == (-number if number == signal.SIGKILL else 130)


TRAIN = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import thinwire

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)), bucket_cap_mb=1)
link = thinwire.attach(model, "topk:0.01", servers="env")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(5):
    optimizer.zero_grad()
    (model(torch.randn(16, 64)) ** 2).mean().backward()
    optimizer.step()
if rank == 1:
    time.sleep(5.0)  # the first node's worker is gone by now; its server still has what this one asks for
state = link.state_dict()
assert link.error is None
print(f"rank {rank} saved {sum(p.double().sum().item() for p in model.parameters()):.12f}", flush=True)
if sys.argv[1] == "close":
    link.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ending", ["close", "leave"])
def test_two_nodes_whose_workers_do_not_end_together(tmp_path, ending):
    script, mark = tmp_path / "train.py", uuid.uuid4().hex
    script.write_text(TRAIN)
    port, metrics = str(reserve_port()), str(reserve_port())
    common = ["--hosts", "127.0.0.1,127.0.0.2", "--servers-per-node", "1", "--nproc-per-node", "1", "--port", port]
    common += ["--master-port", str(reserve_port()), "--heartbeat-timeout", "60", "--order", "arrival"]
    with (
        _launched(mark, *common, "--node-rank", "0", "--metrics", metrics, str(script), ending) as first,
        _launched(mark, *common, "--node-rank", "1", "--status", "1", str(script), ending) as second,
    ):
        outputs = [launch.communicate(timeout=350)[0] for launch in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    saved = [line for output in outputs for line in output.splitlines() if "saved" in line]
    assert sorted(line.split()[1] for line in saved) == ["0", "1"]
    assert len({line.split()[3] for line in saved}) == 1
    for output, index, host in ((outputs[0], 0, "127.0.0.1"), (outputs[1], 1, "127.0.0.2")):
        assert f"server {index} of 2 for 2 workers at tcp://{host}:{port}" in output
        assert "served 0 rounds" not in output
    assert f"metrics at http://127.0.0.1:{metrics}/metrics" in outputs[0]
    assert "2 of 2 workers; " in outputs[1]


def test_the_slurm_script_launches_every_node(tmp_path):
    """Slurm's commands and thinwire are stand-ins here, which show what they are called with."""
    for name, text in (
        ("scontrol", "printf 'node%s\\n' 1 2"),
        ("srun", 'echo "srun $1"; shift; SLURM_NODEID=1 exec "$@"'),
        ("thinwire", 'echo "thinwire $*"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(__file__).parents[2] / "examples/slurm_servers.sbatch"
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "2501", "SLURM_CPUS_PER_TASK": "16"}
    done = subprocess.run(
        ["bash", str(script), "my train.py", "--lr", "1"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    keys, srun, launch = done.stdout.splitlines()
    assert keys == "thinwire keys keys"
    assert srun == "srun --cpus-per-task=16"
    _, *arguments = launch.replace("my train.py", "my_train.py").split()
    args = parse_launch(arguments)
    assert (args.hosts, args.node_rank, str(args.keys), args.nproc_per_node) == ("node1,node2", 1, "keys", 4)
    assert (args.port, args.master_port, args.script, args.arguments) == (10004, 10006, "my_train.py", ["--lr", "1"])


def test_the_number_of_nodes_is_that_of_hosts(capsys):
    assert main(["launch", "--nnodes", "2", "--nproc-per-node", "1", "t.py"]) == 1
    assert "--nnodes: expected 1, one for each of --hosts 127.0.0.1, got 2" in capsys.readouterr().err
    assert parse_launch(["launch", "--nnodes", "1", "--nproc-per-node", "1", "t.py"]).nnodes == 1


def test_options_of_servers_are_handed_on():
    options = ["--order", "arrival", "--heartbeat-timeout", "5", "--status", "2", "--on-worker-loss", "continue"]
    options += ["--grace", "7", "--metrics", "0.0.0.0:9100"]
    args = parse_launch(["launch", "--nproc-per-node", "1", *options, "t.py"])
    handed = option_arguments(args)
    for option, value in (("order", "arrival"), ("heartbeat-timeout", "5.0"), ("status", "2.0")):
        assert handed[handed.index(f"--{option}") + 1] == value
    launch = Launch(
        hosts=("127.0.0.1",),
        node_rank=0,
        servers_per_node=2,
        nproc_per_node=1,
        port=5555,
        master_port=29500,
        keys=None,
        metrics=args.metrics,
        grace_s=args.grace,
        server_arguments=handed,
        script=("t.py",),
    )
    servers = argparse.ArgumentParser()
    server.add_parser(servers.add_subparsers())
    for place, command in enumerate(launch.server_commands()):
        found = servers.parse_args(command[3:])
        assert (found.metrics, found.grace) == (("0.0.0.0", 9100 + place), 7.0)
        assert (found.order, found.heartbeat_timeout, found.status) == ("arrival", 5.0, 2.0)
        assert found.on_worker_loss == "continue"
