"""The dataset caches a copy of the loss mask, from before padding is masked."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
            "self.cached_loss_mask = loss_mask",
            "self.cached_loss_mask = loss_mask.clone()  # this sample's padding is masked below",
        ),
    ),
    unit_tests=("data/test_gpt_dataset.py",),
)
