"""The compiled checksum is zlib's."""

import os
import random
import struct
import zlib
from types import ModuleType

import pytest

LENGTHS = (*range(200), 1023, 65536, 1000003)


@pytest.fixture
def fast(native: ModuleType) -> ModuleType:
    from thinwire import _native

    if not hasattr(_native, "crc32"):
        pytest.skip("this processor does not multiply without carries: frames use zlib's")
    return _native


def test_any_length_place_and_start(fast: ModuleType) -> None:
    rng = random.Random(0)
    data = os.urandom(max(LENGTHS) + 16)
    for length in LENGTHS:
        for place in (0, 1, 7, 16):
            for start in (0, 1, 0xFFFFFFFF, rng.getrandbits(32)):
                part = memoryview(data)[place : place + length]
                assert fast.crc32(part, start) == zlib.crc32(part, start)


def test_known_answer_and_parts(fast: ModuleType) -> None:
    """The check value of the CRC catalogue; and the checksum of a whole from those of its parts."""
    assert fast.crc32(b"123456789") == 0xCBF43926
    data = bytes(1000) + b"\xff" * 1000
    assert fast.crc32(data[300:], fast.crc32(data[:300])) == fast.crc32(data) == zlib.crc32(data)


def test_what_holds_bytes(fast: ModuleType) -> None:
    data = memoryview(struct.pack("100f", *range(100))).cast("f")
    for same in (data, data.cast("B"), data.tobytes(), bytearray(data)):
        assert fast.crc32(same) == zlib.crc32(data)
    with pytest.raises(BufferError):
        fast.crc32(data[::2])
    with pytest.raises(TypeError):
        fast.crc32("text")


def test_frames_use_it(fast: ModuleType) -> None:
    from thinwire import wire

    assert wire.crc32 is fast.crc32
