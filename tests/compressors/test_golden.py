"""Bytes stay what they were: kept encodings of every wire layout. See golden.py."""

import json

import pytest
from table import TABLE, name

from golden import FILE, record
from thinwire import Compressor, LowRank
from thinwire.wire import WIRE_FORMAT

KEPT = json.loads(FILE.read_text())


def test_they_are_of_this_wire_format_and_of_every_compressor() -> None:
    assert KEPT["wire_format"] == WIRE_FORMAT
    assert list(KEPT["encodings"]) == [name(compressor) for compressor in TABLE]


@pytest.mark.parametrize("compressor", TABLE, ids=name)
def test_bytes_are_the_kept_ones(compressor: Compressor) -> None:
    if isinstance(compressor, LowRank):
        pytest.skip("its encoder may find other factors on other machines")
    assert record(compressor) == KEPT["encodings"][name(compressor)]
