"""Recorded gradients: one file with every rank's gradient of every parameter at chosen steps.

The file is an uncompressed NumPy `.npz`, which is a zip archive of `.npy` arrays, and holds no pickled objects:

    meta.npy            uint8: a JSON object {"schema": 1, "steps", "num_ranks", "shapes": {name: shape}, "conditions"}
    STEP/NAME.npy       float32, (num_ranks, *shape): the gradients of parameter NAME at step STEP, before any exchange
"""

import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.bench.workloads import Workload
from thinwire.errors import ThinwireError

SCHEMA = 1

Shapes = Mapping[str, tuple[int, ...]]


class RecordingWriter(AbstractContextManager["RecordingWriter"]):
    """Writes a recording piece by piece; the file appears under its name when all is there.

    Args:
        path: of the file.
        steps: that will be written.
        num_ranks: ranks of each step.
        shapes: of every parameter, in the order of registration.
        conditions: what a reader must know of where the gradients come from.
    """

    def __init__(
        self, path: Path, *, steps: Sequence[int], num_ranks: int, shapes: Shapes, conditions: Mapping[str, Any]
    ) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._zip = zipfile.ZipFile(self._part, "w", zipfile.ZIP_STORED)
        meta = {
            "schema": SCHEMA,
            "steps": list(steps),
            "num_ranks": num_ranks,
            "shapes": {name: list(shape) for name, shape in shapes.items()},
            "conditions": dict(conditions),
        }
        self._put("meta", np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8))

    def write(self, step: int, name: str, gradients: Tensor) -> None:
        """Add one parameter's gradients of one step: (num_ranks, *shape)."""
        self._put(f"{step}/{name}", gradients.to(torch.float32).numpy())

    def _put(self, name: str, array: "np.ndarray[Any, Any]") -> None:
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the file; after an error leave none."""
        self._zip.close()
        if kind is None:
            os.replace(self._part, self._path)
        else:
            self._part.unlink()


class Recording:
    """Reads a recording.

    Attributes:
        steps: recorded, ascending.
        num_ranks: ranks of each.
        shapes: of every parameter, in the order of registration.
        conditions: as recorded.

    Raises:
        ThinwireError: the file is none, or not whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.stat()
            if not zipfile.is_zipfile(path):  # which NumPy would notice with the file left open
                raise ValueError("not a zip archive, or cut short")
            meta: dict[str, Any] = json.loads(self._array("meta").tobytes())
            if meta["schema"] != SCHEMA:
                raise ValueError(f"schema {meta['schema']}, expected {SCHEMA}")
            self.steps = [int(step) for step in meta["steps"]]
            self.num_ranks = int(meta["num_ranks"])
            self.shapes = {str(name): tuple(map(int, shape)) for name, shape in meta["shapes"].items()}
            self.conditions: dict[str, Any] = dict(meta["conditions"])
        except FileNotFoundError as error:
            raise ThinwireError(f"{path}: no such file; `thinwire record --out {path}` makes a recording") from error
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, zipfile.BadZipFile) as error:
            raise self._bad(error) from error
        if not self.steps or self.num_ranks < 1 or not self.shapes:
            raise self._bad("it holds nothing")

    def _array(self, name: str) -> "np.ndarray[Any, Any]":
        with np.load(self._path, allow_pickle=False) as arrays:  # so that nothing stays open between reads
            return arrays[name]

    def read(self, step: int, name: str) -> Tensor:
        """Return one parameter's gradients of one step: (num_ranks, *shape), float32.

        Raises:
            ThinwireError: they are missing, of another shape or dtype, or not finite.
        """
        try:
            array = self._array(f"{step}/{name}")
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise self._bad(error) from error
        expected = (self.num_ranks, *self.shapes[name])
        if array.shape != expected or array.dtype != np.float32:
            raise self._bad(
                f"{name} at step {step}: expected float32 of {expected}, got {array.dtype} of {array.shape}"
            )
        gradients = torch.from_numpy(array)
        if not gradients.isfinite().all():
            raise self._bad(f"{name} at step {step} is not finite")
        return gradients

    def _bad(self, why: object) -> ThinwireError:
        return ThinwireError(f"{self._path}: expected a recording of `thinwire record`, got something else: {why}")


def record(
    path: Path,
    workloads: Sequence[Workload],
    *,
    steps: Sequence[int],
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train as data parallel ranks would, in one process, and write the gradients of some steps.

    Step t is computed after t - 1 updates, each with the mean over ranks, as DDP without compression does.

    Args:
        path: of the file.
        workloads: one per rank, alike but for their data.
        steps: to write, counted from 1.
        seed: of parameters and batches.
        conditions: what a reader must know of where the gradients come from; the workload's facts are added.
        on_step: called with the step and its mean loss after each.
    """
    model = workloads[0].model(seed)
    optimizer = workloads[0].optimizer(model.parameters())
    for workload in workloads:
        workload.start(seed)
    params = dict(model.named_parameters())
    writer = RecordingWriter(
        path,
        steps=steps,
        num_ranks=len(workloads),
        shapes={name: tuple(param.shape) for name, param in params.items()},
        conditions={**workloads[0].facts(), **(conditions or {}), "seed": seed},
    )
    with writer:
        for step in range(1, max(steps) + 1):
            losses, grads = [], {name: torch.zeros(len(workloads), *param.shape) for name, param in params.items()}
            for rank, workload in enumerate(workloads):
                model.zero_grad(set_to_none=True)
                loss = workload.loss(model)
                loss.backward()
                losses.append(loss.item())
                for name, param in params.items():
                    if param.grad is not None:
                        grads[name][rank] = param.grad
            if step in steps:
                for name, gradients in grads.items():
                    writer.write(step, name, gradients)
            for name, param in params.items():
                param.grad = grads[name].mean(dim=0)
            if optimizer is not None:
                optimizer.step()
            on_step(step, sum(losses) / len(losses))
