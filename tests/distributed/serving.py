"""Server processes for tests."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass
class ServerProcess:
    """One `thinwire server`, bound to a free port."""

    address: str
    process: subprocess.Popen[str]
    log: IO[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return Path(self.log.name).read_text()

    def close(self) -> None:
        self.kill()
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


def start(
    num_workers: int,
    index: int = 0,
    num: int = 1,
    *arguments: str,
    bind: str = "tcp://127.0.0.1:0",
    program: Sequence[str] = ("-m", "thinwire"),
) -> ServerProcess:
    log = tempfile.NamedTemporaryFile(mode="w+", prefix="server-", suffix=".log")  # noqa: SIM115  # kept open
    command = [sys.executable, *program, "server", "--bind", bind, "--num-workers", str(num_workers)]
    process = subprocess.Popen(
        [*command, "--server-index", f"{index}/{num}", *arguments], stdout=subprocess.PIPE, stderr=log, text=True
    )
    assert process.stdout is not None
    line, server = process.stdout.readline(), ServerProcess("", process, log)
    if " at tcp://" not in line:
        process.wait(20)
        said = line + server.output()
        server.close()
        raise AssertionError(f"a server did not start: {said}")
    server.address = line.split(" at ")[1].strip()
    return server


@contextmanager
def servers(num_workers: int, num: int = 1, *arguments: str, dying: str = "") -> Iterator[Sequence[ServerProcess]]:
    """Give `num` servers, which must end by themselves when asked to; the last dies at a stage if `dying` names one."""
    started: list[ServerProcess] = []
    try:
        for index in range(num):
            dies = dying and index == num - 1
            program = [str(Path(__file__).with_name("dying_server.py")), dying] if dies else ["-m", "thinwire"]
            started.append(start(num_workers, index, num, *arguments, program=program))
        yield started
        for one in started:
            if one.process.poll() is None:
                one.process.terminate()
                assert one.process.wait(20) == 0, one.output()
    finally:
        for one in started:
            one.close()
