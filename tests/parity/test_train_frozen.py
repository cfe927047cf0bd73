"""k calls of stock `train(n)` are one call of `train(k * n)`, where only adapters are trained.

The adapters are those of tests/step/lora.py. Runs on the releases that carry `megatron.training`.
"""

import sys
from pathlib import Path

import pytest

from megatron_idempotent.patching.source import locate

STEP = str(Path(__file__).parents[1] / "step")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

pytestmark = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


def train(layout, calls, layers, *, applied):
    """Runs on a rank: losses of the last stage, the parameters' bytes, and how many were
    trained."""
    sys.path.insert(0, STEP)
    from lora import Lora

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import program

    if applied:
        megatron_idempotent.apply(strict=True)
    running = program.start(OVERLAP, before_ddp=Lora(layers=layers), **layout)
    for iterations in calls:
        running.train(iterations)
    trained = sum(len(chunk.params_with_grad) for chunk in running.chunks)
    return running.losses, running.parameters().numpy().tobytes(), trained


@pytest.mark.parametrize(
    ("ranks", "layout", "layers"),
    [
        pytest.param(2, {}, None, id="dp2"),
        pytest.param(2, {"pp": 2}, (2,), id="pp2, nothing on the first stage"),
        pytest.param(
            4,
            {"pp": 2, "vpp": 2, "shared_config": True},
            (3,),
            id="pp2 vpp2 dp2, one chunk",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_train_again_with_adapters(megatron_ranks, ranks, layout, layers):
    once = megatron_ranks(ranks, train, layout, (4,), layers, applied=False, timeout_s=120)
    again = megatron_ranks(ranks, train, layout, (2, 2), layers, applied=True, timeout_s=120)
    assert again == once
    assert sum(trained for *_, trained in once) > 0
