from types import SimpleNamespace

import numpy
import torch

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split, compile_helpers


def _dataset():
    tokenizer = SimpleNamespace(vocab_size=4000, eod=3999, pad=3000, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=2048,
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    config.mock = True
    documents = MockGPTDataset.build_low_level_dataset(None, config)
    return MockGPTDataset(documents, None, numpy.arange(50), 40, Split.train, config)


def test_cached_loss_mask_has_no_padding_of_first_sample():
    compile_helpers()
    dataset = _dataset()
    alone = [_dataset()[index]["loss_mask"] for index in range(8)]
    padded = min(range(8), key=lambda index: alone[index].sum())
    assert (alone[padded] == 0).any()  # the data have the padding token in some samples
    # The dataset caches the mask of the sample that it serves first.
    assert torch.equal(dataset[padded]["loss_mask"], alone[padded])
    for index in range(8):
        assert torch.equal(dataset[index]["loss_mask"], alone[index])
