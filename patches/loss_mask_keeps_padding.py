"""The padding of one sample stays in the loss mask of all samples that come after it.

Symptom:
    Tokens of later samples do not count in the loss, at the positions at which the dataset's first
    sample had padding. A sample's mask depends on which sample came first, in each worker of the
    data loader: a resumed run has other masks than one that continues. No error.

Cause:
    `GPTDataset.__getitem__` caches the mask of its first call for all calls, and writes the zeros
    of that sample's padding into it. Before 0.15 later calls also write into it.

Affects:
    Every release, if masks are cached: without `reset_position_ids`, `reset_attention_mask` and
    `eod_mask_loss`. Padding is at the end of the last validation sample, and wherever the data
    contain its token; before 0.16 also at ends of documents, if the tokenizer has one token for
    both. What the patch does: the cached mask has no padding.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/1711, after which later calls copy the mask;
    https://github.com/NVIDIA/Megatron-LM/pull/6981 also copies it in the first call.

Remove when:
    `__getitem__` caches a copy of the mask. `upstream/loss-mask-keeps-padding` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, address, target


def getitem(original: Original, self: Any, idx: int | None) -> Any:
    """Wrap `GPTDataset.__getitem__`: return the sample, and reset the dataset's cached mask."""
    import torch

    sample = original(self, idx)
    if self.masks_and_position_ids_are_cached:  # only if padding alone is masked
        self.cached_loss_mask = torch.ones_like(self.cached_loss_mask)
    return sample


def reproduce() -> None:
    """Get a sample with padding, then another one from the same dataset.
    On stock Megatron the loss mask of the second sample also has the padding of the first.
    """
    import types

    import numpy
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.utils import Split

    tokenizer = types.SimpleNamespace(vocab_size=4000, eod=3999, pad=3000, unique_identifiers={})
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1,
        sequence_length=2048,
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    config.mock = True
    Mock = gpt_dataset.MockGPTDataset
    documents = Mock.build_low_level_dataset(None, config)

    def masked(*served: int) -> int:
        data = Mock(documents, None, numpy.arange(50), 40, Split.train, config)
        return [int((data[index]["loss_mask"] == 0).sum()) for index in served][-1]

    first = next(index for index in range(40) if masked(index))
    alone, after_first = masked(first + 1), masked(first, first + 1)
    if alone != after_first:
        raise Fault("a sample's loss mask depends on the one before it")


PATCH = Patch(
    "padding of a dataset's first sample masks the loss of all later ones",
    target(
        "core.datasets.gpt_dataset:GPTDataset.__getitem__",
        getitem,
        "self.cached_loss_mask = loss_mask",
        "loss_mask[labels == self._pad_token_id] = 0.0",
    ),
    fixed_when=a_body_has("self.cached_loss_mask = loss_mask.clone()"),
    fixed_by=(
        (
            address("core.datasets.gpt_dataset:GPTDataset.__getitem__"),
            "self.cached_loss_mask = loss_mask.clone()",
        ),
    ),
    ranks=1,
)
