from megatron_idempotent.megatron.expert_replay import ExpertReplay as ExpertReplay

from .fsdp import FSDPTrainStep as FSDPTrainStep
from .loss import POLICY_GRADIENT_NORMALIZERS as POLICY_GRADIENT_NORMALIZERS
from .loss import StepCounts as StepCounts
from .loss import StepLoss as StepLoss
from .megatron import TrainStep as TrainStep
from .megatron import gpt_forward as gpt_forward
from .megatron import gpt_inputs as gpt_inputs
from .microbatches import valid_counts as valid_counts
from .pack_layout import all_positions as all_positions
from .pack_layout import own_positions as own_positions
from .packs import bin_sequences as bin_sequences
from .packs import pack_batches as pack_batches
from .results import BatchResult as BatchResult
from .results import StepResult as StepResult
from .schedule import StepSchedule as StepSchedule
