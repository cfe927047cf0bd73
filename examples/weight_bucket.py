"""Send weights to an engine through a bucket; trainer and engine share only its URL.

    python examples/weight_bucket.py [URL]    # with the extras trainer and bucket

A rank trains a small Qwen3 in Megatron and publishes each step's weights. An engine in another
process loads them, and has the same bits in the end. The URL may be a folder, or s3://bucket/run.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from typing import Any

from megatron_idempotent.proof import cpu
from megatron_idempotent.rl.sync import BucketFollower, BucketPublisher, WeightSync

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODEL = {"architectures": ["Qwen3ForCausalLM"], **SIZES, **HEADS}
STEPS = 6


def train(url: str) -> list[str]:
    """Train on a rank, and publish each step's weights to a bucket; return lines to print."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from transformers import AutoConfig

    from megatron_idempotent.logprobs import model_logprobs, shift_targets
    from megatron_idempotent.rl import hf

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    arch = hf.Architecture.of(AutoConfig.for_model("qwen3", **MODEL).to_dict())
    model = hf.build_gpt(arch, arch.transformer_config()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    source = hf.MegatronWeights([model], arch)
    sync = WeightSync([BucketPublisher(url, run="example", anchor_every=4)])
    ids, said = torch.arange(32).cuda()[None], []
    for version in range(1, STEPS + 1):
        stats = model_logprobs(model, ids, None, None, targets=shift_targets(ids))
        (-stats.logprob.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        told = asyncio.run(sync.update(source, version, deltas=True))
        said.append(f"version {version}: {told.bytes_sent} of {told.bytes_whole} bytes sent")
    sums = [sum(bucket.checksums.values()) for bucket in source.buckets(bucket_bytes=1 << 28)]
    return [*said, f"the trainer's bits: {sum(sums) % 2**64:016x}"]


async def serve(url: str) -> None:
    """Load a bucket's new weight versions into an engine, until it has the last version."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_idempotent.rl.engines.transformers import TransformersEngine
    from megatron_idempotent.rl.weights import checksum

    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL))
    engine = TransformersEngine(model, version=0)
    follower = BucketFollower(url, [engine])
    while (await engine.health()).version != STEPS:
        if found := await follower.catch_up():
            print(f"engine: {found.describe()}")
        await asyncio.sleep(0.05)
    print(f"the engine's bits:  {sum(map(checksum, model.state_dict().values())) % 2**64:016x}")


def main(url: str) -> None:
    BucketPublisher(url, run="example")  # fail before a rank starts if the URL is wrong
    command = [sys.executable, __file__, "serve", url]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    print(*cpu.run_ranks(1, train, url)[0], engine.communicate(timeout=300)[0], sep="\n")


if __name__ == "__main__":
    place = sys.argv[-1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    asyncio.run(asyncio.wait_for(serve(place), 300)) if "serve" in sys.argv else main(place)
