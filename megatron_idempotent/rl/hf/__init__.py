"""Loads Hugging Face checkpoints into Megatron's GPTModel, and saves such checkpoints.

    arch = Architecture.read(directory)
    chunks = [build_gpt(arch, arch.transformer_config(tensor_model_parallel_size=2))]
    load_hf(directory, chunks)
    save_hf(MegatronWeights(chunks, arch), new_directory, like=directory)

Importing this package imports neither torch nor Megatron; safetensors is needed to load.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
