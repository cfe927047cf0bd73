"""Runs the `token_logprobs` benchmark on a GPU, as fractions of the device's attainable speed.

From logits, the bound is memory bandwidth: the time in which a copy on the device, measured in the
same run, would move the necessary bytes (the forward reads the logits; the backward reads them and
writes the gradient) ÷ the measured time. From hidden states, the bound is the speed of an 8192 ×
8192 matrix product: the forward needs one product of hidden states and weight, the backward three
more. The shapes are those for which SkyRL publishes results on an H100: hidden size 2,048, a shard
of 62,080 columns, 8 to 262 thousand tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks import _logprob_peers, _logprob_sides
from benchmarks._device import aim
from benchmarks._gpu import DEVICE, about, copied_bytes_per_s, measured, multiplied_flops_per_s
from benchmarks._logprob_cases import Case, Inputs, Side
from benchmarks._logprob_rounds import _errors, _step, _words
from benchmarks._record import tell

COLUMNS, FEATURES = 62080, 2048
#: The number of tokens whose outputs are compared with float64.
_COMPARED = 64
#: GB and seconds that SkyRL publishes for 262,144 tokens, with entropy but without its gradient.
PUBLISHED = {"SkyRL, torch": (4.3, 3.7), "SkyRL, Triton": (9.9, 0.88)}


def cases(options: Any) -> Iterator[Case]:
    """Yield the cases to measure: first from logits, with so few tokens that logits and gradients
    fit into memory, then from hidden states.
    """
    common: dict[str, Any] = {"ranks": 1, "vocabulary": COLUMNS, "features": FEATURES}
    for dtype, tokens in (("bfloat16", 8192), ("bfloat16", 32768), ("float32", 8192)):
        for entropy in ("none", "grad"):
            yield Case(form="logits", dtype=dtype, entropy=entropy, tokens=tokens, **common)
    for tokens in options.device_tokens:
        for entropy in ("none", "grad"):
            yield Case(form="hidden", dtype="bfloat16", entropy=entropy, tokens=tokens, **common)


def sides(case: Case) -> tuple[list[Side], dict[str, str]]:
    """Return the implementations that can run a case, and, by package, the reason why a package's
    implementations are missing.

    They are this library's, Megatron's, plain torch, and other libraries'.
    """
    from megatron_idempotent import token_logprobs

    absent: dict[str, str] = {}
    found = _logprob_sides.sides(case)

    def by_torch(given: Any) -> tuple[Any, Any]:
        form = ("logits",) if case.form == "logits" else ("hidden", "weight")
        stats = token_logprobs(
            **dict(zip(form, given.inputs, strict=True)),
            targets=given.targets,
            token_mask=given.kept,
            entropy=given.entropy,
            triton=False,
        )
        return stats.logprob, stats.entropy

    found.insert(2 if case.form == "logits" else 1, Side(name="ours, by torch", run=by_torch))
    if case.form == "logits":
        try:
            found += _logprob_sides._megatron()
        except ModuleNotFoundError as missing:
            absent["Megatron"] = f"not installed: {missing}"
    for peer, make in _logprob_peers.SIDES.items():
        try:
            found += make(case)
        except Exception as refusal:  # noqa: BLE001  # its own words are the result
            absent[peer] = _words(refusal)
    return [side for side in found if case.entropy in side.entropies], absent


def _group() -> Any:
    """Return Megatron's tensor-parallel group of this single rank, which is created if needed; None
    without Megatron.

    Megatron's cross entropy needs it.
    """
    try:
        from megatron.core import parallel_state
    except ModuleNotFoundError:
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def rows(case: Case, rounds: int, copied: float, multiplied: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each implementation with two times, of its forward and of forward with
    backward. Each time has a fraction: the least time that the GPU's speed allows ÷ the measured
    time.
    """
    import torch

    group = _group()
    with torch.device(DEVICE):
        few = Inputs(case, group, _COMPARED)
        truth = few.truth()
        inputs = Inputs(case, group, case.tokens)
    given_gb = sum(each.nbytes for each in inputs.part) / 1e9
    elements = case.tokens * case.vocabulary
    size = getattr(torch, case.dtype).itemsize
    product_ms = 2 * elements * case.features / multiplied * 1e3
    chosen, absent = sides(case)
    for side in chosen:
        row: dict[str, Any] = {"side": side.name, "inputs_gb": given_gb}
        try:
            row |= _errors(side, few, truth)
            torch.compiler.reset()
            forward = measured(inputs.fresh, side.run, rounds)
            both = measured(
                inputs.fresh, lambda given, side=side: _step(side, inputs, given), rounds
            )
        except Exception as refusal:  # noqa: BLE001  # its own words are the result
            row["refused"] = _words(refusal)
            torch.cuda.empty_cache()
            yield row
            continue
        for name, call, passes, products in (("forward", forward, 1, 1), ("both", both, 3, 4)):
            least_ms = passes * elements * size / copied * 1e3
            if case.form == "hidden":
                least_ms = products * product_ms
            row[name] = {
                **dataclasses.asdict(call),
                "least_ms": least_ms,
                "share": least_ms / call.ms,
            }
        yield row
    for name, words in absent.items():
        yield {"side": name, "refused": words}


def tuned(rounds: int, copied: float) -> Iterator[dict[str, Any]]:
    """Measure the kernels that read logits, with each of their block shapes (warps, loads, stages).
    Yield for each shape the measured time, and a fraction: the time in which a copy on the GPU
    moves the bytes that the kernels must move ÷ the measured time.
    """
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import triton_kernels

    for dtype, entropy in itertools.product(("bfloat16", "float32"), ("none", "grad")):
        tokens = 16384 if dtype == "bfloat16" else 8192
        case = Case(
            form="logits", ranks=1, dtype=dtype, entropy=entropy, tokens=tokens, vocabulary=COLUMNS
        )
        with torch.device(DEVICE):
            inputs = Inputs(case, None, tokens)
        nbytes = inputs.part[0].nbytes
        side = Side(name="consume", run=_logprob_sides._ours_from_logits("consume"))
        for kernel, shapes in triton_kernels.SHAPES.items():
            for shape in shapes:
                with triton_kernels.using(**{kernel: shape}):
                    if kernel == "statistics":
                        arguments = {"targets": inputs.targets_N, "entropy": entropy}
                        call = measured(
                            lambda inputs=inputs: inputs.part[0],
                            lambda logits, more=arguments: token_logprobs(logits=logits, **more),
                            rounds,
                        )
                    else:
                        call = measured(
                            inputs.fresh,
                            lambda given, inputs=inputs, side=side: _step(side, inputs, given),
                            rounds,
                        )
                passes = 1 if kernel == "statistics" else 3
                least_ms = passes * nbytes / copied * 1e3
                yield {
                    "kernel": kernel,
                    "dtype": dtype,
                    "entropy": entropy,
                    "shape": shape._asdict(),
                    "ms": call.ms,
                    "share": least_ms / call.ms,
                }
        del inputs


def aims(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Select this library's results from `found`; return the speeds, seconds and memory of
    interest, each with its target on an H100 or H200.
    """
    held: dict[str, Any] = {}
    for row in found:
        if row["side"] != "consume" and row["side"] != "hidden":
            continue
        if "refused" in row:
            continue
        name = f"{row['side']}, {row['dtype']}, {row['tokens']} tokens, entropy {row['entropy']}"
        both = row["both"]
        if row["form"] == "logits":
            held[f"{name}: forward, share of the copy"] = aim(
                row["forward"]["share"], at_least=0.85
            )
            held[f"{name}: with backward, share of the copy"] = aim(both["share"], at_least=0.8)
        elif row["tokens"] == 262144:
            held[f"{name}: GB"] = aim(row["inputs_gb"] + both["beside_gb"], 4.3)
            held[f"{name}: seconds"] = aim(both["ms"] / 1e3, 0.8)
    return held


def main(asked: Any) -> None:
    """Measure all cases; print each when it is measured, or with `--json` all as one object."""
    copied, multiplied = copied_bytes_per_s(), multiplied_flops_per_s()
    told = about() | {"copied_bytes_per_s": copied, "multiplied_flops_per_s": multiplied}
    results: dict[str, Any] = {"about": told, "published_gb_and_s": PUBLISHED}
    if asked.tune:
        results["shapes"] = [*tuned(asked.rounds, copied)]
    else:
        results["cases"] = []
        for case in cases(asked):
            if all(word in str(case) for word in asked.only):
                found = [*rows(case, asked.rounds, copied, multiplied)]
                results["cases"] += [{**dataclasses.asdict(case), **row} for row in found]
                # Print all results so far: if the run is killed, the last complete line has them.
                tell(results if asked.json else {str(case): found}, asked.json)
        results["aims"] = aims(results["cases"])
    tell(results if asked.json else {**results, "cases": []}, asked.json)
