"""Update an engine's weights while it serves: stage the new ones in memory, then switch to them.

    python examples/weight_sync.py

Two CPU ranks share a small Qwen3 in Megatron; rank 0 has an engine, whose weights differ at first.
A response that is running when the engine switches to new weights continues with them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import megatron_idempotent
from megatron_idempotent.proof import cpu

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODEL = {"architectures": ["Qwen3ForCausalLM"], "initializer_range": 0.2, **SIZES, **HEADS}
PROMPT = (5, 3, 7)


async def serve(source: Any, model: Any) -> dict[str, Any]:
    """Update an engine on rank 0 to version 1; return samples from before, during and after."""
    from megatron_idempotent.rl.engines import Request, transformers
    from megatron_idempotent.rl.sync import WeightSync

    async def sample(tokens: int) -> Any:
        return await engine.generate(Request(id="", prompt=PROMPT, max_tokens=tokens, seed=1))

    class Watched(transformers.TransformersEngine):
        async def stage(self, *update: Any) -> None:
            await super().stage(*update)  # now all weights are received and checked
            under_way.append(asyncio.ensure_future(sample(200)))
            samples["staged"] = await sample(16)

    engine, under_way = Watched(model, version=0), []
    samples = {"before": await sample(16)}
    await WeightSync([engine]).update(source, version=1)
    return samples | {"under way": await under_way[0], "after": await sample(16)}


def run() -> list[str]:
    """Compare the log-probs of each sample with Megatron's, on a rank; return lines to print."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_idempotent.logprobs import model_logprobs, shift_targets
    from megatron_idempotent.rl import hf, sync

    megatron_idempotent.apply()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = AutoConfig.for_model("qwen3", **MODEL)
    arch = hf.Architecture.of(config.to_dict())
    model = hf.build_gpt(arch, arch.transformer_config(tensor_model_parallel_size=2)).cuda()
    source, held, said = hf.MegatronWeights([model], arch), [{}], []
    if torch.distributed.get_rank() == 0:
        held = [asyncio.run(serve(source, AutoModelForCausalLM.from_config(config)))]
    else:
        sync.follow(source)  # the export is a collective
    torch.distributed.broadcast_object_list(held)
    for moment, sample in held[0].items():
        ids = torch.tensor([[*PROMPT, *sample.tokens]]).cuda()
        stats = model_logprobs(model, ids, None, None, targets=shift_targets(ids))
        engines, versions = torch.tensor([sample.logprobs, sample.versions]).cuda()
        off = (stats.logprob[0, len(PROMPT) - 1 : -1] - engines).abs()
        for version in sorted(set(sample.versions)):
            mine = off[versions == version]
            said.append(f"{moment:9} {len(mine):3} of version {version}, {mine.max():.1e} off")
    return said


def main() -> None:
    print("tokens, and how far they are from Megatron's:", *cpu.run_ranks(2, run)[0], sep="\n")


if __name__ == "__main__":
    main()
