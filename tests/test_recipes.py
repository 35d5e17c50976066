"""Recipe strings: what they stand for, that they come back, and that bad ones are explained."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import (
    EF21,
    BlockCast,
    BlockQuant,
    Cast,
    Compose,
    Dense,
    ErrorFeedback,
    FixedPoint,
    Gather,
    GlobalExponential,
    GlobalLinear,
    Identity,
    LinearDithering,
    LowRank,
    MinMax,
    MomentumCorrection,
    NaturalCompression,
    NaturalDithering,
    OneBit,
    PowerSGD,
    RandomK,
    Scaled,
    Sign,
    SumOnWire,
    TernGrad,
    TopK,
    TopKC,
    TreeReduce,
    TwoShot,
    parse_recipe,
)
from thinwire.aggregators import Aggregator
from thinwire.errors import RecipeError
from thinwire.recipes import parse_compressor, recipe_names


def both(compressor, feedback: ErrorFeedback | None = None) -> TwoShot:
    return TwoShot(up=compressor, down=compressor, feedback=feedback)


EF = ErrorFeedback()
KNOWN: dict[str, Aggregator] = {
    "dense": Dense(),
    "dense:fp16": Dense(wire_dtype=torch.float16),
    "dense:bf16": Dense(wire_dtype=torch.bfloat16),
    "fp16": both(Cast(dtype=torch.float16)),
    "bf16": both(Cast(dtype=torch.bfloat16)),
    "int8": both(BlockQuant(bits=8)),
    "int8:stochastic": both(BlockQuant(bits=8, rounding="stochastic")),
    "int8:block=64:stochastic": both(BlockQuant(bits=8, block=64, rounding="stochastic")),
    "int4": both(BlockQuant(bits=4), EF),
    "int4:block=128": both(BlockQuant(bits=4, block=128), EF),
    "int4:block=32": both(BlockQuant(bits=4, block=32), EF),
    "int4:rotation=32": both(BlockQuant(bits=4, rotation=32), EF),
    "int4:block=128:stochastic:rotation=128": both(BlockQuant(bits=4, block=128, rounding="stochastic", rotation=128)),
    "int4:stochastic": both(BlockQuant(bits=4, rounding="stochastic")),
    "int7": both(BlockQuant(bits=7)),
    "int6": both(BlockQuant(bits=6), EF),
    "int5": both(BlockQuant(bits=5), EF),
    "int3": both(BlockQuant(bits=3), EF),
    "int2:stochastic": both(BlockQuant(bits=2, rounding="stochastic")),
    "e4m3": both(BlockCast()),
    "e4m3:block=128": both(BlockCast(block=128)),
    "e5m2": both(BlockCast(format="e5m2")),
    "e3m0": both(BlockCast(format="e3m0"), EF),
    "linear:5": both(LinearDithering(bits=5)),
    "linear:7:l2": both(LinearDithering(bits=7, norm="l2")),
    "linear:7:block=512": both(LinearDithering(bits=7, block=512)),
    "natural:3": both(NaturalDithering(bits=3)),
    "natural:8:l2:block=64": both(NaturalDithering(bits=8, norm="l2", block=64)),
    "qsgd:4": both(LinearDithering(bits=4, norm="l2", block=512)),
    "qsgd:2:block=128": both(LinearDithering(bits=2, norm="l2", block=128)),
    "cnat:8": both(NaturalCompression(bits=8)),
    "cnat:9": both(NaturalCompression(bits=9)),
    "terngrad": both(TernGrad()),
    "terngrad:block=512": both(TernGrad(block=512)),
    "terngrad:clip=2.5": both(TernGrad(clip=2.5), EF),
    "terngrad:block=64:clip=1": both(TernGrad(block=64, clip=1.0), EF),
    "minmax:8": both(MinMax(bits=8), EF),
    "minmax:8:block=512": both(MinMax(bits=8, block=512)),
    "minmax:8:bagua:block=512": both(MinMax(bits=8, rule="bagua", block=512)),
    "minmax:4:bagua": both(MinMax(bits=4, rule="bagua"), EF),
    "minmax:4:stochastic:block=64": both(MinMax(bits=4, rounding="stochastic", block=64)),
    "minmax:1": both(MinMax(bits=1), EF),
    "fixpoint:8:block=512": both(FixedPoint(bits=8, block=512)),
    "fixpoint:4": both(FixedPoint(bits=4), EF),
    "onebit": both(OneBit(), EF),
    "onebit:rms": both(OneBit(scale="rms"), EF),
    "topk:0.01": both(TopK(density=0.01), EF),
    "topk:0.001:fp32": both(TopK(density=0.001, value_dtype=torch.float32), EF),
    "topk:0.01:bf16": both(TopK(density=0.01, value_dtype=torch.bfloat16), EF),
    "topk:k=100:natural:chunked": both(TopK(k=100, value_dtype="natural", chunked=True), EF),
    "topk:0.01:fp32:bisect": both(TopK(density=0.01, value_dtype=torch.float32, selection="bisect"), EF),
    "topk:0.01:sampled": both(TopK(density=0.01, selection="sampled"), EF),
    "randomk:0.01": both(RandomK(density=0.01), EF),
    "randomk:0.1:block=64:fp32": both(RandomK(density=0.1, block=64, value_dtype=torch.float32), EF),
    "randomk:0.1:rotating:bf16": both(RandomK(density=0.1, rotating=True, value_dtype=torch.bfloat16), EF),
    "gather/randomk:0.1:scaled": Gather(up=RandomK(density=0.1, scaled=True)),
    "lowrank:4": both(LowRank(rank=4), EF),
    "lowrank:1:num_iterations=1:fp32": both(LowRank(rank=1, num_iterations=1, value_dtype=torch.float32), EF),
    "gather/lowrank:300:bf16": Gather(up=LowRank(rank=300, value_dtype=torch.bfloat16), feedback=EF),
    "identity": both(Identity()),
    "fp16+bf16": TwoShot(up=Cast(dtype=torch.float16), down=Cast(dtype=torch.bfloat16)),
    "topk:0.01+int8": TwoShot(up=TopK(density=0.01), down=BlockQuant(bits=8), feedback=EF),
    "topk:0.01~int8": both(Compose(first=TopK(density=0.01, value_dtype=torch.float32), then=BlockQuant(bits=8)), EF),
    "topk:k=50:chunked~scaled:linear:3": both(
        Compose(first=TopK(k=50, chunked=True, value_dtype=torch.float32), then=Scaled(inner=LinearDithering(bits=3))),
        EF,
    ),
    "randomk:0.1~e4m3": both(
        Compose(first=RandomK(density=0.1, value_dtype=torch.float32), then=BlockCast(format="e4m3")), EF
    ),
    "scaled:natural:3": both(Scaled(inner=NaturalDithering(bits=3)), EF),
    "scaled:int8:stochastic": both(Scaled(inner=BlockQuant(bits=8, rounding="stochastic"))),
    "gather/onebit": Gather(up=OneBit(), feedback=EF),
    "gather/int8:stochastic": Gather(up=BlockQuant(bits=8, rounding="stochastic")),
    "gather/fp16": Gather(up=Cast(dtype=torch.float16)),
    "int8@ef": both(BlockQuant(bits=8), EF),
    "topk:0.01@ef:decay=0.9:lr": both(TopK(density=0.01), ErrorFeedback(decay=0.9, lr_correction=True)),
    "topk:0.001@dgc": both(TopK(density=0.001), MomentumCorrection()),
    "topk:0.01+int8@dgc:0.95:nesterov:clip=2.5": TwoShot(
        up=TopK(density=0.01),
        down=BlockQuant(bits=8),
        feedback=MomentumCorrection(momentum=0.95, nesterov=True, clip=2.5),
    ),
    "gather/onebit@dgc:0.0": Gather(up=OneBit(), feedback=MomentumCorrection(momentum=0.0)),
    "topk:0.001@nag": both(TopK(density=0.001), MomentumCorrection(nesterov=True, masking=False)),
    "linear:5@nag:0.8:clip=1.5": both(
        LinearDithering(bits=5), MomentumCorrection(momentum=0.8, nesterov=True, masking=False, clip=1.5)
    ),
    "onebit@dgc:unmasked": both(OneBit(), MomentumCorrection(masking=False)),
    "topk:0.05@ef21": both(TopK(density=0.05), EF21()),
    "gather/int8@ef21": Gather(up=BlockQuant(bits=8), feedback=EF21()),
    "global:8": SumOnWire(up=GlobalLinear(bits=8)),
    "global:4:l2": SumOnWire(up=GlobalLinear(bits=4, norm="l2")),
    "global:8:halving": TreeReduce(up=GlobalLinear(bits=8, halving=True)),
    "globalexp": TreeReduce(up=GlobalExponential()),
    "globalexp:l2:across-l2": TreeReduce(up=GlobalExponential(norm="l2", across="l2")),
    "sign": Gather(up=Sign()),
    "sign:random": Gather(up=Sign(ties="random")),
    "gather/terngrad:shared": Gather(up=TernGrad(shared=True)),
    "terngrad:shared:block=64+terngrad": TwoShot(up=TernGrad(shared=True, block=64), down=TernGrad()),
    "topkc:0.01": SumOnWire(up=TopKC(density=0.01), feedback=ErrorFeedback()),
    "topkc:0.1:chunk=128:fp32@dgc": SumOnWire(
        up=TopKC(density=0.1, chunk=128, value_dtype=torch.float32), feedback=MomentumCorrection()
    ),
    "powersgd:4": PowerSGD(rank=4),
    "powersgd:1:alternating:aggregated": PowerSGD(rank=1, alternating=True, error="aggregated"),
    "powersgd:2@ef:decay=0.9": PowerSGD(rank=2, feedback=ErrorFeedback(decay=0.9)),
    "sum/randomk:0.01": SumOnWire(up=RandomK(density=0.01), feedback=ErrorFeedback()),
    "sum/randomk:0.1:scaled": SumOnWire(up=RandomK(density=0.1, scaled=True, value_dtype=torch.float32)),
}


@pytest.mark.parametrize("text", ["global:8", "globalexp", "topkc:0.01", "terngrad:shared", "sign"])
def test_owners_encode_alone(text: str) -> None:
    """What waits for a scale of all ranks cannot come back from an owner; nor can a vote be one of a mean."""
    for whole in (f"int8+{text}", f"{text}+{text}", "terngrad:shared"):
        with pytest.raises(RecipeError, match=r"; expected (a kind with scales of its own|'onebit')"):
            parse_recipe(whole)
    with pytest.raises(RecipeError, match=f"recipe '{text}:x': expected"):
        parse_compressor(f"{text}:x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("powersgd", "expected a rank, as in 'powersgd:4'"),
        ("powersgd:0", "expected a rank of at least 1, got 0"),
        ("powersgd:2@dgc", "expected ErrorFeedback as feedback, got MomentumCorrection"),
        ("powersgd:2+int8", "only the two-shot exchange has two"),
        ("sum/powersgd:2", "expected a kind of"),
        ("sum/int8", "cannot be added up on the wire; expected a linear kind"),
        ("sum/global:8:halving", "cannot be added up on the wire"),
        ("sign@ef", "a majority vote takes no feedback, got ErrorFeedback"),
        ("gather/sign@ef", "a majority vote takes no feedback"),
        ("globalexp@ef", "expected no feedback, since 'globalexp' is unbiased, got 'ef'"),
        ("global:8@ef", "unbiased kinds diverge under error feedback"),
        ("topkc:0.01@ef21", "promises nothing of one rank alone"),
    ],
)
def test_what_an_exchange_takes(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text)


def test_room_for_all_ranks() -> None:
    settings = parse_recipe("global:4")
    assert settings.for_world(7).up == GlobalLinear(bits=4, summands=7)
    with pytest.raises(RecipeError, match="expected 1 to 7 summands, got 8; use halving, or 8 bits"):
        settings.for_world(8)
    assert parse_recipe("global:4:halving").for_world(100).up == GlobalLinear(bits=4, halving=True, summands=100)


@pytest.mark.parametrize("text", KNOWN)
def test_meaning_and_round_trip(text: str) -> None:
    assert parse_recipe(text) == KNOWN[text]
    assert parse_recipe(f" {text}\n") == KNOWN[text]
    assert KNOWN[text].recipe() == text


def test_defaults_may_be_written_out() -> None:
    assert parse_recipe("int8:nearest:block=512") == parse_recipe("int8")
    assert parse_recipe("linear:4:l2:block=512") == parse_recipe("qsgd:4")
    assert parse_recipe("natural:3:max") == parse_recipe("natural:3")
    assert parse_recipe("minmax:8:affine:nearest") == parse_recipe("minmax:8")
    assert parse_recipe("onebit:l1") == parse_recipe("onebit")
    assert parse_recipe("topk:1e-2:fp16") == parse_recipe("topk:0.01")
    assert parse_recipe("topk:0.01@ef:decay=1") == parse_recipe("topk:0.01")
    assert parse_recipe("topk:0.01@dgc:0.9:nesterov") == parse_recipe("topk:0.01@dgc:nesterov")


@given(density=st.floats(min_value=1e-9, max_value=1.0), wide=st.booleans())
def test_any_density_comes_back(density: float, wide: bool) -> None:
    compressor = TopK(density=density, value_dtype=torch.float32 if wide else torch.float16)
    assert parse_recipe(compressor.recipe()).up == compressor


def test_full_density_is_sent_without_feedback() -> None:
    assert parse_recipe("topk:1").feedback is None
    assert parse_recipe("topk:1").recipe() == "topk:1"


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        ("", "a kind of compressor", "''"),
        ("int9", "a kind of compressor", "'int9': did you mean 'int8'"),
        ("INT8", "a kind of compressor", "'INT8': did you mean 'int8'"),
        ("int8:", "'stochastic', 'nearest', 'block=N' or 'rotation=N'", "''"),
        ("int8:fast", "'stochastic', 'nearest', 'block=N' or 'rotation=N'", "'fast'"),
        ("int8:rotation=64", "a rotation of 32 or 128", "64"),
        ("int8:rotation=x", "a number", "'x'"),
        ("int8:block=x", "a number", "'x'"),
        ("int8:block=", "a number", "''"),
        ("int8:block=7", "even block from 32", "7"),
        ("e4m3:x", "'block=N'", "'x'"),
        ("e5m2:block=7", "even block from 32", "7"),
        ("fp16:x", "no further argument", "'x'"),
        ("onebit:l2", "'l1' or 'rms'", "'l2'"),
        ("onebit:l1:x", "'l1' or 'rms'", "'x'"),
        ("onebit:l1:rms", "each setting once", "'l1:rms'"),
        ("sign:minus", "'plus' or 'random'", "'minus'"),
        ("linear", "bits, as in 'linear:5'", ""),
        ("linear:9", "bits from 2 to 8", "9"),
        ("natural:x", "a number", "'x'"),
        ("natural:3:l1", "'max', 'l2' or 'block=N'", "'l1'"),
        ("cnat", "bits, as in 'cnat:8'", ""),
        ("cnat:7", "bits 8 or 9", "7"),
        ("cnat:8:l2", "no further argument", "'l2'"),
        ("terngrad:2", "'shared', 'block=N' or 'clip=N'", "'2'"),
        ("terngrad:shared:clip=2.5", "no clip with a shared scale", "2.5"),
        ("scaled:terngrad:shared", "a compressor with scales of its own", "terngrad:shared"),
        ("terngrad:clip=0.5", "clip of at least 1", "0.5"),
        ("qsgd:4:l2", "'block=N'", "'l2'"),
        ("linear:4:l2:max", "each setting once", "'4:l2:max'"),
        ("fixpoint:1", "bits from 2 to 8", "1"),
        ("fixpoint:8:block=33", "even block from 32", "33"),
        ("minmax", "bits, as in 'minmax:8'", ""),
        ("minmax:9", "bits from 1 to 8", "9"),
        ("minmax:1:bagua", "bits from 2 to 8", "1"),
        ("minmax:8:bagua:stochastic", "the affine rule", "bagua"),
        ("minmax:8:affine:bagua", "each setting once", "'8:affine:bagua'"),
        ("minmax:8:block=33", "even block from 32", "33"),
        ("topk", "a density, as in 'topk:0.01'", ""),
        ("topk:", "a number", "''"),
        ("topk:many", "a number", "'many'"),
        ("topk:0", r"density in \(0, 1\]", "0.0"),
        ("topk:2", r"density in \(0, 1\]", "2.0"),
        ("topk:nan", r"density in \(0, 1\]", "nan"),
        ("topk:0.1:fp64", "'fp16', 'fp32'", "'fp64'"),
        ("topk:0.1:fp32:x:y", "'fp16', 'fp32'", "'x'"),
        ("topk:0.1:fp32:fp16", "each setting once", "'0.1:fp32:fp16'"),
        ("topk:k=x", "a number", "'x'"),
        ("topk:0.1:k=3", "density or k", "k=3"),
        ("topk:k=0", "k of at least 1", "0"),
        ("topk:natural", "a density, as in 'topk:0.01'", ""),
        ("randomk", "a density, as in 'randomk:0.01'", ""),
        ("randomk:0.1:x", "'rotating', 'scaled'", "'x'"),
        ("randomk:0.1:scaled:fp16", "float32 values", "float16"),
        ("randomk:0.1:block=2:block=4", "each setting once", "'0.1:block=2:block=4'"),
        ("randomk:0.1:scaled", "it in one hop", "randomk:0.1:scaled"),
        ("lowrank", "a rank, as in 'lowrank:4'", ""),
        ("lowrank:1.5", "a number", "'1.5'"),
        ("lowrank:0", "rank of at least 1", "0"),
        ("lowrank:2:num_iterations=0", "at least 1 iteration", "0"),
        ("lowrank:2:fp64", "'bf16' or 'num_iterations=N'", "'fp64'"),
        ("topk:0.1~", "a kind of compressor", "''"),
        ("int8~int4", "'topk' or 'randomk'", "'int8'"),
        ("randomk:0.1~linear:3", "no numbers behind a shared key", "linear:3"),
        ("scaled:int8", "an unbiased compressor", "int8"),
        ("scaled:", "a kind of compressor", "''"),
        ("dense:int8", "'dense:fp16' or 'dense:bf16'", "'int8'"),
        ("dense:fp16:x", "no further argument", "'x'"),
        ("tree/int8", "aggregator 'gather', 'sum' or 'hier' or none", "'tree'"),
        ("/int8", "aggregator 'gather', 'sum' or 'hier' or none", "''"),
        ("gather/gather/int8", "aggregator 'gather', 'sum' or 'hier' or none", "'gather/gather'"),
        ("gather/", "a kind of compressor", "''"),
        ("gather/dense", "a kind of compressor", "'dense'"),
        ("int8:nearest:stochastic", "each setting once", "'nearest:stochastic'"),
        ("int4:block=64:block=128", "each setting once", "'block=64:block=128'"),
        ("int8+", "a kind of compressor", "''"),
        ("int8+int9", "a kind of compressor", "'int9'"),
        ("zzz", "a kind of compressor", "'zzz': for example int8"),
        ("dense+int8", "one compressor", "'dense+int8'"),
        ("gather/int8+int8", "one compressor", "'int8+int8'"),
        ("topk:0.1@", "feedback 'ef', 'dgc', 'ef21' or 'nag'", "''"),
        ("topk:0.1@ef22", "feedback 'ef', 'dgc', 'ef21' or 'nag'", "'ef22'"),
        ("topk:0.1@ef21:0.9", "no further argument", "'0.9'"),
        ("topk:0.1@ef:0.9", "'lr' or 'decay=N'", "'0.9'"),
        ("topk:0.1@dgc:1", r"momentum in \[0, 1\)", "1.0"),
        ("topk:0.1@dgc:0.9:0.9", "'nesterov', 'unmasked' or 'clip=N'", "'0.9'"),
        ("topk:0.1@dgc:much", "a number", "'much'"),
        ("topk:0.1@dgc@ef", "feedback 'ef', 'dgc', 'ef21' or 'nag'", "'dgc@ef'"),
        ("dense@dgc", "no feedback, since dense loses nothing", "'dgc'"),
        ("dense:fp16@ef", "no feedback, since dense loses nothing", "'ef'"),
    ],
)
def test_bad_recipes_say_what_was_expected_and_what_came(text: str, expected: str, got: str) -> None:
    with pytest.raises(RecipeError, match=f"expected.*{expected}") as caught:
        parse_recipe(text)
    message = str(caught.value)
    assert message.startswith(f"recipe {text!r}: ")
    assert got in message
    assert caught.value.__cause__ is None


@given(st.text("abcdefgintoposk0123456789./:=-+@", max_size=20))
def test_any_text_is_a_recipe_or_a_recipe_error(text: str) -> None:
    try:
        found = parse_recipe(text)
    except RecipeError:
        return
    assert isinstance(found, Aggregator)
    assert parse_recipe(found.recipe()) == found


def test_every_kind_is_listed() -> None:
    texts = [text.partition("@")[0].rpartition("/")[2] for text in KNOWN]
    singles = [single for text in texts for part in text.split("+") for single in part.split("~")]
    kinds = {single.removeprefix("scaled:").split(":")[0] for single in singles}
    assert kinds == set(recipe_names())


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("topk:0.01:fp32~int8", "no dtype of values before '~'.*got 'fp32': write 'topk:0.01~int8'"),
        ("topk:0.01:natural:chunked~int8", "got 'natural': write 'topk:0.01:chunked~int8'"),
        ("randomk:0.1:bf16~e4m3", "got 'bf16': write 'randomk:0.1~e4m3'"),
        ("topk:0.01~int8~int8", "expected one '~'.*got 'int8~int8' there"),
        ("topk:0.01~topk:0.1~int8", "expected one '~'"),
    ],
)
def test_what_stands_around_a_tilde(recipe: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        parse_recipe(recipe)
    parse_recipe("topk:0.01:chunked~int8")
