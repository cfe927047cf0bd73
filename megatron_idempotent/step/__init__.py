"""One optimizer step in any number of pieces: `TrainStep` on Megatron, `FSDPTrainStep` on FSDP2.

Data flows records → batch → lifecycle → a backend (`megatron`, `fsdp`), and back as a result.
"""
