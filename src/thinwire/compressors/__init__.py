"""Compressors: frozen settings that turn one block of floats into bytes and back."""

from thinwire.compressors.base import Compressor as Compressor
from thinwire.compressors.block import BlockQuant as BlockQuant
from thinwire.compressors.cast import Cast as Cast
from thinwire.compressors.cast import Identity as Identity
from thinwire.compressors.contract import Additive as Additive
from thinwire.compressors.contract import Contract as Contract
from thinwire.compressors.contract import Contractive as Contractive
from thinwire.compressors.contract import NoContract as NoContract
from thinwire.compressors.contract import Unbiased as Unbiased
from thinwire.compressors.contract import is_exact as is_exact
from thinwire.compressors.contract import needs_feedback as needs_feedback
from thinwire.compressors.dither import LinearDithering as LinearDithering
from thinwire.compressors.dither import NaturalDithering as NaturalDithering
from thinwire.compressors.global_qsgd import GlobalExponential as GlobalExponential
from thinwire.compressors.global_qsgd import GlobalLinear as GlobalLinear
from thinwire.compressors.lowrank import LowRank as LowRank
from thinwire.compressors.min_max import MinMax as MinMax
from thinwire.compressors.natural import NaturalCompression as NaturalCompression
from thinwire.compressors.random_k import RandomK as RandomK
from thinwire.compressors.sign import OneBit as OneBit
from thinwire.compressors.sparse import TopK as TopK
from thinwire.compressors.terngrad import TernGrad as TernGrad
from thinwire.compressors.top_chunks import TopKC as TopKC
