from .blockwise import dequantize_blockwise as dequantize_blockwise
from .blockwise import quantize_blockwise as quantize_blockwise
from .export import Fp8Export as Fp8Export
from .packing import Pack as Pack
from .packing import TokenAlignment as TokenAlignment
from .packing import token_alignment as token_alignment
