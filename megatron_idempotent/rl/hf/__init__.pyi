from megatron_idempotent.rl.weights.safetensors_io import CheckpointDamaged as CheckpointDamaged

from .config import Architecture as Architecture
from .config import CheckpointMismatch as CheckpointMismatch
from .config import FailedElsewhere as FailedElsewhere
from .config import UnsupportedArchitecture as UnsupportedArchitecture
from .export import MegatronWeights as MegatronWeights
from .load import build_gpt as build_gpt
from .load import load_hf as load_hf
from .names import Lora as Lora
from .save import save_hf as save_hf
