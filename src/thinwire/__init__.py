"""thinwire: PyTorch training that sends less over slow networks."""

from thinwire import hooks as hooks
from thinwire.aggregators import Aggregator as Aggregator
from thinwire.aggregators import Dense as Dense
from thinwire.aggregators import Gather as Gather
from thinwire.aggregators import TwoShot as TwoShot
from thinwire.api import attach as attach
from thinwire.compressors import BlockCast as BlockCast
from thinwire.compressors import BlockQuant as BlockQuant
from thinwire.compressors import Cast as Cast
from thinwire.compressors import Compose as Compose
from thinwire.compressors import Compressor as Compressor
from thinwire.compressors import GlobalExponential as GlobalExponential
from thinwire.compressors import GlobalLinear as GlobalLinear
from thinwire.compressors import Identity as Identity
from thinwire.compressors import LinearDithering as LinearDithering
from thinwire.compressors import LowRank as LowRank
from thinwire.compressors import MinMax as MinMax
from thinwire.compressors import NaturalCompression as NaturalCompression
from thinwire.compressors import NaturalDithering as NaturalDithering
from thinwire.compressors import OneBit as OneBit
from thinwire.compressors import RandomK as RandomK
from thinwire.compressors import Scaled as Scaled
from thinwire.compressors import Sign as Sign
from thinwire.compressors import TernGrad as TernGrad
from thinwire.compressors import TopK as TopK
from thinwire.compressors import TopKC as TopKC
from thinwire.errors import ThinwireError as ThinwireError
from thinwire.feedback import EF21 as EF21
from thinwire.feedback import ErrorFeedback as ErrorFeedback
from thinwire.feedback import Feedback as Feedback
from thinwire.feedback import MomentumCorrection as MomentumCorrection
from thinwire.integrations.link import Link as Link
from thinwire.integrations.loggers import CSV as CSV
from thinwire.integrations.loggers import LogLine as LogLine
from thinwire.integrations.loggers import TensorBoard as TensorBoard
from thinwire.plan import ParamInfo as ParamInfo
from thinwire.plan import Patterns as Patterns
from thinwire.plan import Plan as Plan
from thinwire.plan import PlanOptions as PlanOptions
from thinwire.recipes import parse_recipe as parse_recipe
from thinwire.schedule import Ramp as Ramp
from thinwire.schedule import Schedule as Schedule
from thinwire.spec import BlockSpec as BlockSpec
from thinwire.state import reshard_state as reshard_state

__version__ = "0.1.0"
