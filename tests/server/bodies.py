"""Bodies of frames with something wrong in them, under checksums that fit."""

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.server.protocol import AND_PULL, Kind
from thinwire.wire import Frame, align, digest_of

TEXTS = (Kind.HELLO, Kind.DECLARE, Kind.BYE, Kind.GET)
RAW = "@raw@"  # replaced by what no value makes: deep nesting, and numbers of any length
RECIPES = (
    "", ":", "~", "+", "@", "sign", "dense", "global:8", "topk:0.1~topk:0.1~int8", "scaled:" * 400 + "int8",
    "topk:nan", "topk:1e400", "topk:-1", "topk:k=99999999999999999999", "topk:1e-300", "int8:block=0",
    "int8:rotation=3", "int8:block=99999999999999999999", "int8:rotation=4611686018427387904", "lowrank:0",
    "lowrank:99999999999999999999", "lowrank:2:num_iterations=99999999999999999999", "linear:-1", "natural:99",
    "randomk:1e-300", "randomk:0.1:block=99999999999999999999", "qsgd:4:block=-9223372036854775808", "fixpoint:99",
    "terngrad:clip=1e-320", "terngrad:shared", "minmax:8:block=1", "topkc:0.5:chunk=0", "ef:decay=nan",
    "ef:decay=1e-400", "dgc:nan", "dgc:1e400", "nag:0.9:clip=-1", "ef21", "ef", "dgc:0.9", "identity", "onebit",
    "int4", "topk:0.5", "fp16",
)  # fmt: skip
SCALARS = (
    None, True, False, 0, 1, -1, 2, 3, 77, 1 << 31, 1 << 32, 1 << 63, 1 << 64, -(1 << 70), 10**4299, 0.0, 1.5, -0.5,
    1e308, 5e-324, float("nan"), float("inf"), -float("inf"), "", "x", "\ud800", "\0", "0" * 1000, "float64", "int8",
    "float16",
)  # fmt: skip


def body_changed(rng: random.Random, frame: Frame, frames: Sequence[Frame]) -> Frame:
    """Return the frame with another body, or in a place where this body does not belong.

    Args:
        rng: draws what changes.
        frame: a genuine one.
        frames: others of the run, whose bodies and contents may be taken.
    """
    payload = bytes(frame.payload)
    match rng.randrange(10):
        case 0:  # the body of another frame
            return dataclasses.replace(frame, payload=rng.choice(frames).payload)
        case 1:  # as another kind, known or not
            return dataclasses.replace(frame, kind=rng.randrange(15))
        case 2:  # of another content or round
            content = rng.choice((0, rng.getrandbits(64), rng.choice(frames).content))
            round_ = rng.choice((frame.round, frame.round + rng.choice((1, 2)), rng.getrandbits(64)))
            return dataclasses.replace(frame, content=content, round=round_)
        case 3:
            flags = rng.choice((0, AND_PULL, 2, 0x80, 0xFF))
            return dataclasses.replace(frame, flags=flags, payload=bytes_changed(rng, payload))
        case _ if frame.kind in TEXTS and payload:
            return _of_text(frame, text_changed(rng, payload))
        case _ if frame.kind == Kind.PUT:
            return dataclasses.replace(frame, payload=_put_changed(rng, payload))
        case _:
            return _of_text(frame, bytes_changed(rng, payload))


def _of_text(frame: Frame, payload: bytes) -> Frame:
    """Return the frame with this text; a content is named by its own digest, else nobody would read it."""
    content = digest_of(payload.decode(errors="replace")) if frame.kind == Kind.DECLARE else frame.content
    return dataclasses.replace(frame, payload=payload, content=content)


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """Return bytes cut short, too long, flipped, or others altogether."""
    at = rng.randrange(min(len(data), rng.choice((48, len(data)))) or 1)  # headers stand in front
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at],
        lambda: data[at:],
        lambda: data + rng.randbytes(rng.choice((1, 4, 64))),
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: (
            data[: at & ~3] + rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", rng.randbytes(4))) + data[(at & ~3) + 4 :]
        ),
        lambda: rng.randbytes(len(data)),
        lambda: b"",
    )
    return rng.choice(changes)()


def text_changed(rng: random.Random, data: bytes) -> bytes:
    """Return a JSON text with one value, field or entry changed anywhere in it; seldom just other bytes."""
    if rng.random() < 0.1:
        return bytes_changed(rng, data)
    raw = rng.choice(
        ("[" * (depth := rng.choice((10, 300, 980, 2000))) + "]" * depth, '{"x":' * 400, "9" * 5000, "1e999")
    )
    return json.dumps(_changed(rng, json.loads(data))).replace(f'"{RAW}"', raw).encode()


def _changed(rng: random.Random, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return _other(rng, value)
    changed = value.copy()
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    match rng.randrange(8):
        case 0:
            del changed[key]
        case 1 if isinstance(changed, list):
            changed.append(value[key])
        case 1:
            changed[rng.choice(("", "x", "rank"))] = value[key]
        case _:
            changed[key] = _changed(rng, value[key])
    return changed


def _other(rng: random.Random, value: Any) -> Any:
    near: tuple[Any, ...] = ([value], {"x": value}, [], {}, RAW)
    if isinstance(value, str):
        near += (*rng.sample(RECIPES, 8), value + "x", value[1:])
    elif isinstance(value, int):
        near += (value + 1, value - 1, -value, 2 * value, float(value), str(value), bool(value))
    return rng.choice((*near, *rng.sample(SCALARS, 8)))


def _put_changed(rng: random.Random, data: bytes) -> bytes:
    """Change the text, its length, the values' number or type, or a value to none that can be."""
    length = int.from_bytes(data[:4], "little")
    text, values = data[4 : 4 + length], data[4 + align(length) :]
    match rng.randrange(6):
        case 0:
            wrong = rng.choice((0, length - 1, length + 4, len(data), 0xFFFFFFFF))
            return wrong.to_bytes(4, "little") + data[4:]
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:  # as if it were of another dtype
            return data[: 4 + align(length)] + rng.choice((values * 2, values[: len(values) // 2], values + b"\0"))
        case 3:
            bad = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"))
            return data[:-4] + bad
        case _:
            text = text_changed(rng, text)
            return len(text).to_bytes(4, "little") + text + bytes(-len(text) % 4) + values
