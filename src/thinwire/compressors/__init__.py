"""Compressors: frozen settings that turn one block of floats into bytes and back."""

from thinwire.compressors.base import Compressor as Compressor
from thinwire.compressors.block import BlockQuant as BlockQuant
from thinwire.compressors.block_cast import BlockCast as BlockCast
from thinwire.compressors.cast import Cast as Cast
from thinwire.compressors.cast import Identity as Identity
from thinwire.compressors.compose import Compose as Compose
from thinwire.compressors.contract import Contract as Contract
from thinwire.compressors.contract import Contractive as Contractive
from thinwire.compressors.contract import NoContract as NoContract
from thinwire.compressors.contract import Unbiased as Unbiased
from thinwire.compressors.contract import needs_feedback as needs_feedback
from thinwire.compressors.dither import LinearDithering as LinearDithering
from thinwire.compressors.dither import NaturalDithering as NaturalDithering
from thinwire.compressors.random_k import RandomK as RandomK
from thinwire.compressors.scaled import Scaled as Scaled
from thinwire.compressors.sign import OneBit as OneBit
from thinwire.compressors.sign import Sign as Sign
from thinwire.compressors.sparse import TopK as TopK
