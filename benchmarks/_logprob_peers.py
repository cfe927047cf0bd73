"""Defines the other libraries in the `token_logprobs` benchmark, called as in their trainers.

The result lists a library that is not installed as missing, and one that raises with its error.
None of them applies top-k or top-p to the log-probs that it trains on.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._logprob_cases import Case, Given, Side

#: SkyRL's default number of tokens per chunk in its fused output layer.
_SKYRL_CHUNK = 1024


def _skyrl(case: Case) -> list[Side]:
    """Return SkyRL's fused output layers as implementations, loaded from a checkout; they compute
    no gradient of the entropy.
    """
    if case.form == "logits" or case.entropy != "none":
        return []
    source = os.environ.get("SKYRL_SOURCE")
    if not source:
        raise ModuleNotFoundError("SKYRL_SOURCE names no checkout of SkyRL")
    folder = Path(source, "skyrl", "backends", "skyrl_train", "distributed", "megatron")

    def side(name: str, file: str, function: str) -> Side:
        def run(given: Given) -> tuple[Any, Any]:
            compute = getattr(_from_file(folder / file), function)
            hidden_NH, weight_VH = given.inputs
            shard = (0, len(weight_VH), _SKYRL_CHUNK, given.group, False)
            found = compute.apply(hidden_NH[None], weight_VH, given.targets[None], *shard)
            return found[0], None

        return Side(name=f"SkyRL, {name}", run=run, entropies=("none",))

    return [
        side("torch", "model_utils.py", "FusedLinearChunkedDistributedLogprob"),
        side("Triton", "fused_linear_logprob_triton.py", "FusedLinearLogprobTriton"),
    ]


@functools.cache
def _from_file(path: Path) -> Any:
    """Import a single file as a module and return it. The package of the file is not imported,
    because that would need all dependencies of a trainer.
    """
    spec = importlib.util.spec_from_file_location(f"_peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ModuleNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks up its functions' source there
    spec.loader.exec_module(module)
    return module


def _verl(case: Case) -> list[Side]:
    if (source := os.environ.get("VERL_SOURCE")) and source not in sys.path:
        sys.path.insert(0, source)
    if case.form == "hidden":
        return _verl_hidden(case)
    return _verl_parallel() if case.ranks > 1 else _verl_logits()


def _verl_parallel() -> list[Side]:
    """Return verl's implementation for a split vocabulary, as its Megatron engine calls it, without
    the division by the temperature.
    """
    from verl.utils.megatron.tensor_parallel import (
        vocab_parallel_entropy,
        vocab_parallel_log_probs_from_logits,
    )

    def run(given: Given) -> tuple[Any, Any]:
        logits_1NV, targets_1N = given.inputs[0][None], given.targets[None]
        if given.entropy == "none":
            return vocab_parallel_log_probs_from_logits(logits_1NV, targets_1N)[0], None
        # The log-probs overwrite float32 logits, which the entropy needs in its backward.
        copy_1NV = logits_1NV.clone()
        entropy_1N = vocab_parallel_entropy(logits_1NV)
        return vocab_parallel_log_probs_from_logits(copy_1NV, targets_1N)[0], entropy_1N[0]

    return [Side(name="verl", run=run)]


def _verl_logits() -> list[Side]:
    """Return verl's implementations for one rank, as its FSDP engine calls them; by default the
    entropy is compiled.
    """
    import torch
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    def side(entropy_of: Any) -> Callable[[Given], tuple[Any, Any]]:
        def run(given: Given) -> tuple[Any, Any]:
            logits_NV = given.inputs[0]
            entropy_N = None if given.entropy == "none" else entropy_of(logits_NV)
            return logprobs_from_logits(logits_NV, given.targets), entropy_N

        return run

    return [
        Side(name="verl", run=side(torch.compile(entropy_from_logits, dynamic=True))),
        Side(name="verl, eager", run=side(entropy_from_logits), entropies=("metric", "grad")),
    ]


def _verl_hidden(case: Case) -> list[Side]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    fused = FusedLinearForPPO()

    def kernel(given: Given) -> Any:
        arguments = (*given.inputs, given.targets, 1.0, "none", given.group)
        return linear_cross_entropy(*arguments)

    found = [Side(name="verl, Triton", run=kernel)]
    if case.ranks == 1:
        found.insert(0, Side(name="verl", run=lambda given: fused(*given.inputs, given.targets)))
    return found


def _liger(case: Case) -> list[Side]:
    if case.form == "logits":
        return _liger_logits(case)
    if case.ranks > 1:
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
            LigerFusedLinearScaledCrossEntropyTPFunction as Parallel,
        )

        def parallel(given: Given) -> tuple[Any, Any]:
            wanted = given.entropy != "none"
            arguments = (*given.inputs, _ignoring(given), given.group)
            return _negated(Parallel.apply(*arguments, return_entropy=wanted), wanted)

        return [Side(name="Liger, parallel", run=parallel)]
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction as Scaled,
    )

    def scaled(given: Given) -> tuple[Any, Any]:
        wanted = given.entropy != "none"
        arguments = (*given.inputs, _ignoring(given))
        return _negated(Scaled.apply(*arguments, return_entropy=wanted), wanted)

    def chunked(given: Given) -> tuple[Any, Any]:
        """Compute log-probs as Liger's GRPO loss does for a chunk, here for the whole batch."""
        hidden_NH, weight_VH = given.inputs
        found = LigerFusedLinearPPOBase.chunk_forward(
            hidden_NH[None], weight_VH, given.targets[None]
        )
        return found[0], None

    return [
        Side(name="Liger", run=scaled),
        Side(name="Liger, of GRPO", run=chunked, entropies=("none",)),
    ]


def _liger_logits(case: Case) -> list[Side]:
    """Return Liger's cross entropies of logits as implementations; they need Triton."""
    from liger_kernel.megatron import LigerMegatronCrossEntropy
    from liger_kernel.transformers.functional import liger_cross_entropy

    def parallel(given: Given) -> tuple[Any, Any]:
        compute = LigerMegatronCrossEntropy()
        loss_N1 = compute(given.inputs[0][:, None], given.targets[:, None], given.group)
        return -loss_N1[:, 0], None

    def whole(given: Given) -> tuple[Any, Any]:
        return -liger_cross_entropy(given.inputs[0], given.targets, reduction="none"), None

    run = parallel if case.ranks > 1 else whole
    return [Side(name="Liger", run=run, entropies=("none",))]


def _trl(case: Case) -> list[Side]:
    if case.ranks > 1:
        return []
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    def logits(given: Given) -> tuple[Any, Any]:
        """Return log-probs and entropies, None if not asked for, by TRL's functions that take
        logits; the tokens are passed to them as four sequences.
        """
        logits_BTV = given.inputs[0].unflatten(0, (4, -1))
        targets_BT = given.targets.unflatten(0, (4, -1))
        if given.entropy == "none":
            return utils.selective_log_softmax(logits_BTV, targets_BT).flatten(), None
        found = utils.selective_log_softmax_and_entropy(
            logits_BTV, targets_BT, entropy_requires_grad=given.entropy == "grad"
        )
        return found[0].flatten(), found[1].flatten()

    def hidden(given: Given) -> tuple[Any, Any]:
        """Return log-probs and entropies, None if not asked for, by TRL's function that takes
        hidden states. The arguments are those of TRL's output layer without Triton; no token mask
        is passed.
        """
        chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
        wanted = () if given.entropy == "none" else ("entropy",)
        arguments = (*given.inputs, None, given.targets, 1.0, chunk, None, 1.0, wanted)
        logprob_N, entropy_N, *_ = ChunkedLogProbFunction.apply(*arguments)
        return logprob_N, entropy_N

    return [Side(name="TRL", run=logits if case.form == "logits" else hidden)]


def _ignoring(given: Given) -> Any:
    return given.targets if given.kept is None else given.targets.masked_fill(~given.kept, -100)


def _negated(found: Any, wanted: bool) -> tuple[Any, Any]:
    return (-found[0], found[1]) if wanted else (-found, None)


#: For each package, a function that returns its implementations for a case. The function raises
#: ModuleNotFoundError if the package or one of its dependencies is missing.
SIDES: dict[str, Callable[[Case], list[Side]]] = {
    "skyrl": _skyrl,
    "verl": _verl,
    "liger_kernel": _liger,
    "trl": _trl,
}
