"""auto among the methods of a benchmark."""

import pytest

from thinwire.bench.checks import check_settings
from thinwire.bench.methods import bucket_cap_mb
from thinwire.bench.results import _note
from thinwire.bench.settings import Settings, parse_methods
from thinwire.errors import ThinwireError


def test_auto_is_a_method() -> None:
    assert parse_methods("ddp,auto,int8") == ("ddp", "auto", "int8")
    check_settings(Settings(methods=("ddp", "auto")))
    for wrong in ("autos", "servers:1/auto", "auto then int8"):
        with pytest.raises(ValueError, match="unknown method"):
            parse_methods(wrong)


def test_auto_is_for_ddp_models() -> None:
    with pytest.raises(ThinwireError, match="expected --wrap ddp"):
        check_settings(Settings(methods=("auto",), wrap="fsdp"))


def test_buckets_are_ddps_where_the_wire_is_fast() -> None:
    assert bucket_cap_mb("auto", None, None) == bucket_cap_mb("ddp", None, None)
    assert bucket_cap_mb("auto", None, 100e6) == bucket_cap_mb("int4", None, 100e6)


def test_a_run_that_ends_in_the_trial_says_so() -> None:
    few, enough = ({"method": "auto", "steps": steps, "start_after": 5} for steps in (46, 47))
    assert "expected at least 47, got 46: its step is the last one" in _note(few)
    assert _note(enough) == ""
