"""One rank: loads functions of test modules by path and runs each in a fresh gloo group. See `rank_pool`."""

import datetime
import faulthandler
import importlib.util
import pickle
import signal
import sys
import traceback
import types
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Serve calls until the pipe closes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("error")
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    modules: dict[str, types.ModuleType] = {}
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(call, modules)))


def _answer(call: tuple[Any, ...], modules: dict[str, types.ModuleType]) -> tuple[Any, str]:
    path, name, rank, world_size, where, args = call
    try:
        if path not in modules:
            modules[path] = _load(path)
        dist.init_process_group(
            "gloo",
            store=_store(where, rank, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=45),
        )
        value = getattr(modules[path], name)(rank, world_size, *args)
        if dist.is_initialized():
            dist.barrier()  # else a quick rank's end would look like a failure to the slow ones
        return value, ""
    except BaseException:
        return None, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _load(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _store(where: str, rank: int, world_size: int) -> dist.Store:
    kind, _, place = where.partition(":")
    if kind == "file":
        return dist.FileStore(place, world_size)
    return dist.TCPStore("127.0.0.1", int(place), world_size, is_master=rank == 0)


if __name__ == "__main__":
    main()
