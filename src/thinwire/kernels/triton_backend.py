"""The Triton kernels for CUDA tensors, with the functions and the bytes of reference.py.

All jobs of a call are one launch, or a few. Encoders and the decoders of top-k and of ternary codes wait for the device
once, at their end; other decoders, norms and reductions do not wait. `threads` is what the other backends take, and
changes nothing here.
"""

from typing import NoReturn

from thinwire.errors import ThinwireError
from thinwire.kernels import reference
from thinwire.kernels.low_rank import decode_low_rank as decode_low_rank
from thinwire.kernels.low_rank import draw_q as draw_q
from thinwire.kernels.low_rank import encode_low_rank as encode_low_rank
from thinwire.kernels.low_rank import orthogonalise_ as orthogonalise_
from thinwire.kernels.low_rank import reconstruct as reconstruct
from thinwire.kernels.triton_block_cast import decode_block_cast as decode_block_cast
from thinwire.kernels.triton_block_cast import encode_block_cast as encode_block_cast
from thinwire.kernels.triton_block_quant import decode_block_quant as decode_block_quant
from thinwire.kernels.triton_block_quant import encode_block_quant as encode_block_quant
from thinwire.kernels.triton_cast import all_finite as all_finite
from thinwire.kernels.triton_cast import decode_cast as decode_cast
from thinwire.kernels.triton_cast import encode_cast as encode_cast
from thinwire.kernels.triton_dither import decode_dither as decode_dither
from thinwire.kernels.triton_dither import encode_dither as encode_dither
from thinwire.kernels.triton_fixed_point import decode_fixed_point as decode_fixed_point
from thinwire.kernels.triton_fixed_point import encode_fixed_point as encode_fixed_point
from thinwire.kernels.triton_global import decode_global_exponential as decode_global_exponential
from thinwire.kernels.triton_global import decode_global_linear as decode_global_linear
from thinwire.kernels.triton_global import encode_global_exponential as encode_global_exponential
from thinwire.kernels.triton_global import encode_global_linear as encode_global_linear
from thinwire.kernels.triton_global import reduce_global_exponential as reduce_global_exponential
from thinwire.kernels.triton_global import reduce_global_linear as reduce_global_linear
from thinwire.kernels.triton_min_max import decode_min_max as decode_min_max
from thinwire.kernels.triton_min_max import encode_min_max as encode_min_max
from thinwire.kernels.triton_natural import decode_natural as decode_natural
from thinwire.kernels.triton_natural import encode_natural as encode_natural
from thinwire.kernels.triton_norms import shared_norms as shared_norms
from thinwire.kernels.triton_one_bit import decode_one_bit as decode_one_bit
from thinwire.kernels.triton_one_bit import encode_one_bit as encode_one_bit
from thinwire.kernels.triton_random_k import decode_random_k as decode_random_k
from thinwire.kernels.triton_random_k import encode_random_k as encode_random_k
from thinwire.kernels.triton_sign import decode_sign as decode_sign
from thinwire.kernels.triton_sign import encode_sign as encode_sign
from thinwire.kernels.triton_sign import majority_vote as majority_vote
from thinwire.kernels.triton_ternary import decode_ternary as decode_ternary
from thinwire.kernels.triton_ternary import encode_ternary as encode_ternary
from thinwire.kernels.triton_top_chunks import decode_top_chunks as decode_top_chunks
from thinwire.kernels.triton_top_chunks import encode_top_chunks as encode_top_chunks
from thinwire.kernels.triton_top_k import decode_top_k as decode_top_k
from thinwire.kernels.triton_top_k import encode_top_k as encode_top_k


def __getattr__(name: str) -> NoReturn:
    if name.startswith(("encode_", "decode_")) or callable(getattr(reference, name, None)):
        kind = name.removeprefix("encode_").removeprefix("decode_").replace("_", " ")
        raise ThinwireError(f"{kind} has no CUDA kernels yet; set THINWIRE_KERNELS=reference")
    raise AttributeError(name)
