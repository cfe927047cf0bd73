"""The weight's gradient where Megatron wants it: in `main_grad`, as the unfused path has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from megatron_idempotent import token_logprobs
from megatron_idempotent.logprobs import Sampling

H, V = 16, 600


@pytest.mark.parametrize(("cut", "dtype"), [(False, "bfloat16"), (True, "float32")])
@on_ranks(2)
def test_it_is_what_the_hook_would_have_added(cut: bool, dtype: str) -> None:
    """Megatron's DDP around a weight, two microbatches, fused and
    not."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=1)
    rank = dist.get_rank()
    sampling = Sampling(top_k=20) if cut else None

    class Head(torch.nn.Module):
        """Embeds and puts out with one weight, as tied layers do."""

        def __init__(self, tied: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tied = tied
            self.weight = torch.nn.Parameter(torch.randn(V, H).to(getattr(torch, dtype)))
            if tied:
                self.weight.zero_out_wgrad = True

        def forward(self, tokens: Any, hidden: Any, fused: bool) -> Any:
            if self.tied:
                hidden = hidden + torch.nn.functional.embedding(tokens, self.weight)
            return token_logprobs(
                hidden=hidden,
                weight=self.weight,
                targets=tokens,
                sampling=sampling,
                gradient_accumulation_fusion=fused,
                workspace_bytes=1000,
            ).logprob.sum()

    def gradients(tied: bool, fused: bool, overlap: bool) -> Any:
        ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlap,
                use_distributed_optimizer=True,
            ),
            Head(tied),
        )
        ddp.zero_grad_buffer()
        for microbatch in range(2):
            torch.manual_seed(10 * rank + microbatch)
            tokens = torch.randint(0, V, (7,))
            hidden = torch.randn(7, H).to(ddp.module.weight.dtype)
            if microbatch == 0:
                with ddp.no_sync():
                    ddp(tokens, hidden, fused).backward()
            else:
                ddp(tokens, hidden, fused).backward()
        ddp.finish_grad_sync()
        assert ddp.module.weight.grad is None
        return ddp.module.weight.main_grad.clone()

    for tied in (False, True):
        for overlap in (False, True):
            plain, fused = (gradients(tied, each, overlap) for each in (False, True))
            assert plain.any()
            if tied:
                # Two gradients of one weight are added up in another order.
                unit = torch.finfo(getattr(torch, dtype)).eps
                bound = 8 * unit * plain.abs().amax()
                assert (plain - fused).abs().max() <= bound
            else:
                assert torch.equal(plain, fused)


def test_who_has_one_finds_zeros():
    """A plain tensor, with the attributes that Megatron gives it."""
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(5, H, dtype=torch.float64)
    arguments: dict[str, Any] = {"hidden": hidden, "weight": weight, "targets": torch.arange(5)}
    weight.main_grad = torch.ones(V, H, dtype=torch.float64)
    weight.grad_added_to_main_grad = False
    stats = token_logprobs(**arguments, gradient_accumulation_fusion=True)
    stats.logprob.sum().backward()
    assert weight.grad_added_to_main_grad
    assert not weight.grad.any()
    fused = weight.main_grad - 1
    weight.grad = None
    token_logprobs(**arguments).logprob.sum().backward()
    torch.testing.assert_close(fused, weight.grad, rtol=1e-11, atol=1e-13)
