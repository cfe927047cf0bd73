"""The padding of one sample stays in the loss mask of all samples that come after it.

Symptom:
    Tokens of later samples do not count in the loss, at the places where the first sample that the
    dataset served had padding. What a sample's mask is depends on which one came first, in each
    worker of the data loader: a resumed run does not have the masks of one that went on. No error.

Cause:
    `GPTDataset.__getitem__` keeps the mask of its first call for all calls, and writes the zeros
    of this sample's padding into it. Before 0.15 later calls write into it as well.

Affects:
    Every release, where masks are kept: without `reset_position_ids`, `reset_attention_mask` and
    `eod_mask_loss`. Padding is at the end of the last validation sample, and wherever the data has
    its token; before 0.16 also at ends of documents, if the tokenizer has one token for both. What
    the patch does: the mask that is kept is one without padding.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/1711, after which later calls copy the mask;
    https://github.com/NVIDIA/Megatron-LM/pull/6981 copies in the first one too.

Remove when:
    `__getitem__` keeps a copy of the mask.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, a_body_has, target


def getitem(original: Original, self: Any, idx: int | None) -> Any:
    """Serve the sample, and keep a mask for the next one in which all tokens count."""
    import torch

    sample = original(self, idx)
    if self.masks_and_position_ids_are_cached:  # only where no token but padding is masked
        self.cached_loss_mask = torch.ones_like(self.cached_loss_mask)
    return sample


def reproduce() -> None:
    """Serve a sample that has padding, then another one."""
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
        return [int((data[each]["loss_mask"] == 0).sum()) for each in served][-1]

    first = next(index for index in range(40) if masked(index))
    alone, after = masked(first + 1), masked(first, first + 1)
    if alone != after:
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
    ranks=1,
)
