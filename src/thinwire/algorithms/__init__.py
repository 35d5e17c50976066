"""Methods that train for many steps between exchanges: means of models, and outer optimizers on what has changed."""

from thinwire.algorithms.base import LocalMethod as LocalMethod
from thinwire.algorithms.diloco import DiLoCo as DiLoCo
from thinwire.algorithms.local_sgd import LocalSGD as LocalSGD
from thinwire.algorithms.outer import OuterSGD as OuterSGD
from thinwire.algorithms.post_local_sgd import PostLocalSGD as PostLocalSGD
from thinwire.algorithms.rhythm import Rhythm as Rhythm
from thinwire.algorithms.streaming import StreamingDiLoCo as StreamingDiLoCo
