"""Measures deltas of weights after real Adam steps: bytes beside the whole model, and their rate.

    python -m benchmarks.weight_deltas [--hidden 64 768] [--steps 6] [--rounds 5] [--json]
    python -m benchmarks.weight_deltas --device cuda [--rounds 5] [--json]

Each model is a Qwen3 that trains on random tokens on the CPU, with float32 main weights; the sent
weights are bfloat16. For each learning rate, the change of the last step is encoded as a delta of
this library and, for comparison, in formats of other libraries: int32 positions with new values, as
in TRL and prime-rl, and, if zstandard is installed, old XOR new compressed with zstd.
`of_the_bound` is the bytes ÷ (the entropy of the positions + 2 bytes for each change). Rates are
bytes of the model per second of CPU time, on one thread. "fp8" encodes the same weights quantized
to E4M3 in blocks of 128 x 128, with scales.

"updates" measures full updates, and deltas with as many changed elements as at a learning rate of
1e-6, through a disk and through a process group. The time is from the first checksum until another
process has written the weights: the sum of the CPU time of both processes, which work alternately.
`floor_of_a_whole` is the part that no delta can avoid: the comparison, and the receiver's checksum.
"at 1 Gbit/s" and "at 10 Gbit/s" are calculated as this time + bytes ÷ bandwidth. So is the
bandwidth at which full updates and deltas take equally long.

With `--device cuda` the tensors of an update are on a GPU. They are compared there with a copy on
the host or, alternately, copied to the host and compared there. Deltas are written on the GPU.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks._device import add_device, in_turn
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu

RATES = (1e-6, 3e-6, 1e-5, 1e-4)
VOCABULARY = 4096
#: The number of matrices of 8 MB in an update, and the fraction of their elements that changes.
MATRICES, CHANGED = 16, 0.022


def measure(hidden: int, steps: int) -> dict[str, Any]:
    """Train from the same weights at each learning rate; return the sizes of the deltas between two
    steps' weights, and the rates of encoding and applying them.
    """
    import torch

    torch.manual_seed(0)
    model = _model(hidden)
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    shares: dict[str, float]
    old: dict[str, Any]
    new: dict[str, Any]
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in start.values())}
    for rate in RATES:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
        shares, old, new = {}, {}, {}
        for number, sent in enumerate(_steps(model, rate, steps if rate == RATES[0] else 3), 1):
            old, new = new, sent
            if old and rate == RATES[0]:
                shares[f"step {number}"] = _encoded(new, old)["of_the_model"]
        found[f"lr {rate:g}"] = {
            **_encoded(new, old),
            "others": _others(new, old),
            "over steps": shares,
            "fp8": _encoded(_fp8(new), _fp8(old)) if rate == RATES[0] else {},
        }
    return found


def _model(hidden: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY if hidden > 100 else 64,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=8 if hidden > 100 else 2,
            num_attention_heads=max(2, hidden // 64),
            num_key_value_heads=max(2, hidden // 128),
            head_dim=64 if hidden > 100 else 16,
            tie_word_embeddings=False,
        )
    )


def _steps(model: Any, rate: float, steps: int) -> Iterator[dict[str, Any]]:
    """Take steps of Adam on random tokens; yield the weights in bfloat16 after each."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens_BT = torch.randint(0, model.config.vocab_size, (2, 64), generator=generator)
        optimizer.zero_grad()
        model(input_ids=tokens_BT, labels=tokens_BT).loss.backward()
        optimizer.step()
        yield {name: each.detach().bfloat16() for name, each in model.named_parameters()}


def _fp8(weights: dict[str, Any]) -> dict[str, Any]:
    from megatron_idempotent.fp8.export import Fp8Export

    names = {name: each for name, each in weights.items() if "proj" in name}
    return dict(Fp8Export().weights(iter(names.items())))


def _encoded(new: dict[str, Any], old: dict[str, Any]) -> dict[str, float]:
    from megatron_idempotent.rl.weights import checksum
    from megatron_idempotent.rl.weights.deltas import apply, encode

    nbytes = changed = bound = 0.0
    encode_s = decode_s = 0.0
    for name, tensor in new.items():
        before, target = checksum(old[name]), old[name].clone()
        started = time.process_time()
        delta = encode(tensor, old[name], before=before)
        encode_s += time.process_time() - started
        started = time.process_time()
        apply(delta, target)
        decode_s += time.process_time() - started
        assert checksum(target) == checksum(tensor)
        if delta.changed:  # unchanged tensors are not sent
            nbytes += min(delta.nbytes, tensor.nbytes)
        changed += delta.changed
        share = delta.changed / delta.elements
        entropy = -sum(each * math.log2(each) for each in (share, 1 - share) if each)
        bound += entropy * delta.elements / 8 + tensor.element_size() * delta.changed
    whole = sum(each.nbytes for each in new.values())
    return {
        "changed": changed / sum(each.numel() for each in new.values()),
        "of_the_model": nbytes / whole,
        "of_the_bound": nbytes / bound if bound else 0.0,
        "encode_gb_per_s": whole / encode_s / 1e9,
        "decode_gb_per_s": whole / decode_s / 1e9,
        "both_gb_per_s": whole / (encode_s + decode_s) / 1e9,
    }


def _others(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Encode the change from `old` to `new` in other libraries' formats. Return by format the
    encoded bytes ÷ the model's bytes, and the rate of encoding in GB/s.
    """
    import torch

    def sparse(tensor: Any, was: Any) -> int:
        at = (tensor.view(torch.int16) != was.view(torch.int16)).flatten().nonzero()
        values = tensor.flatten()[at]
        return int(at.to(torch.int32).nbytes + values.nbytes)

    def xor(tensor: Any, was: Any) -> int:
        bits = tensor.view(torch.int16) ^ was.view(torch.int16)
        return len(zstandard.ZstdCompressor(level=1).compress(bits.numpy().tobytes()))

    ways: dict[str, Any] = {"int32 and values": sparse}
    try:
        import zstandard
    except ModuleNotFoundError:
        pass
    else:
        ways["xor and zstd"] = xor
    whole = sum(each.nbytes for each in new.values())
    found = {}
    for name, way in ways.items():
        started = time.process_time()
        nbytes = sum(way(tensor, old[each]) for each, tensor in new.items())
        rate = whole / (time.process_time() - started) / 1e9
        found[name] = {"of_the_model": nbytes / whole, "encode_gb_per_s": rate}
    return found


def updates(transport: str, rounds: int) -> dict[str, float]:
    """Send full updates and deltas alternately from rank 0 to rank 1. Return on rank 0 the median
    CPU seconds of both ranks together, and ratios of deltas to full updates; on rank 1 {}.
    """
    import torch
    import torch.distributed as dist

    from megatron_idempotent.rl.engines.vllm_inbox import Patched
    from megatron_idempotent.rl.weights import Bucket, Staging, TensorInfo, WeightUpdate, checksum
    from megatron_idempotent.rl.weights.last_sent import LastSent
    from megatron_idempotent.rl.weights.records import DELTA
    from megatron_idempotent.rl.weights.transports import DiskSender, ProcessGroupSender, receiver

    def told(source: int, what: Any = None) -> Any:
        box = [what]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    torch.manual_seed(0)
    weights = {str(each): 0.02 * torch.randn(4096, 1024) for each in range(MATRICES)}
    weights = {name: each.bfloat16() for name, each in weights.items()}
    seconds: dict[str, list[float]] = {"whole": [], "deltas": [], "floor": []}
    nbytes = dict.fromkeys(seconds, 0)
    last, sums = LastSent(), dict.fromkeys(weights, 0)

    async def send(folder: str, version: int, kind: str) -> None:
        before = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            bits = tensor.view(torch.int16)
            bits += (torch.rand(bits.shape) < CHANGED).to(torch.int16)
        started = time.process_time()
        for name, tensor in weights.items():
            checksum(tensor)
            _ = tensor.view(torch.int16).numpy() != before[name].view(torch.int16).numpy()
        seconds["floor"].append(time.process_time() - started)
        nbytes[kind], started = 0, time.process_time()
        sender = DiskSender(folder) if transport == "disk" else ProcessGroupSender()
        told(0, (version, await sender.open(WeightUpdate(id=f"run/{version}", version=version))))
        for index, (name, tensor) in enumerate(weights.items()):
            if kind == "deltas":  # encoded as in `MegatronWeights`
                delta = last.delta(name, tensor, before=sums[name])
                sums[name] = delta.after
                bucket = Bucket.of(index, {name + DELTA: delta.data})
            else:
                bucket = Bucket.of(index, {name: tensor})
                sums.update(bucket.checksums)
            nbytes[kind] += bucket.nbytes
            told(0, await sender.announce(bucket))
            await sender.transmit(bucket)
            told(1)
            await sender.release(bucket)
        theirs = told(1)
        if version > 1:
            seconds[kind].append(time.process_time() - started + theirs)
        await sender.close()
        if kind == "whole":  # the next deltas build on this version
            for name, tensor in weights.items():
                last.keep(name, tensor)

    def receive(served: dict[str, Any]) -> None:
        version, opened = told(0)
        started = time.process_time()
        update = WeightUpdate(id="run", version=version, base_version=version - 1)
        infos = [TensorInfo.of(name, tensor) for name, tensor in weights.items()]
        staging = Staging(update, expected=infos, served=served.__getitem__)
        inbound = receiver(opened, rank=1)
        for _ in weights:
            staging.add(inbound.receive(told(0)))
            told(1)
        inbound.close()
        served |= Patched(served, staging.complete()).kept()
        told(1, time.process_time() - started)

    served: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in range(1, 2 * rounds + 2):
            if dist.get_rank():
                receive(served)
            else:
                asyncio.run(send(folder, version, ("whole", "deltas")[version % 2 and version > 1]))
    if dist.get_rank():
        return {}
    took = {kind: statistics.median(each) for kind, each in seconds.items()}
    found = {f"{kind}_s": each for kind, each in took.items()}
    for gbit in (1, 10):
        whole, deltas = (took[kind] + nbytes[kind] * 8e-9 / gbit for kind in ("whole", "deltas"))
        found[f"at {gbit} Gbit/s, of_a_whole"] = deltas / whole
    slower_s = took["deltas"] - took["whole"]
    if slower_s > 0:
        found["even_at_gbit_per_s"] = (nbytes["whole"] - nbytes["deltas"]) * 8e-9 / slower_s
    return {
        **found,
        "of_a_whole": took["deltas"] / took["whole"],
        "floor_of_a_whole": took["floor"] / took["whole"],
    }


def on_device(rounds: int) -> dict[str, Any]:
    """Encode and apply deltas of weights on a rank's device. Return the rates in GB/s, and the time
    of comparing weights on the device ÷ that of comparing them on the host.

    The two encodings compare on the device, and on the host after a copy.
    """
    import torch

    from megatron_idempotent.rl.weights import checksum
    from megatron_idempotent.rl.weights.deltas import apply, encode

    weights = [0.02 * torch.randn(4096, 1024, device="cuda") for _ in range(MATRICES)]
    weights = [each.bfloat16() for each in weights]
    old, sums = [each.cpu() for each in weights], [checksum(each) for each in weights]
    for tensor in weights:
        bits = tensor.view(torch.int16)
        bits += (torch.rand(bits.shape, device="cuda") < CHANGED).to(torch.int16)
    deltas = [
        encode(new, was, before=sum_) for new, was, sum_ in zip(weights, old, sums, strict=True)
    ]
    copies: list[Any] = []

    def fresh(side: str) -> None:
        copies[:] = [each.cuda() if side == "written" else each.clone() for each in old]

    def compared(*, on_host: bool) -> None:
        for new, was, sum_ in zip(weights, copies, sums, strict=True):
            encode(new.cpu() if on_host else new, was, before=sum_, write=True)

    sides: dict[str, Callable[[], object]] = {
        "compared there": lambda: compared(on_host=False),
        "over the host": lambda: compared(on_host=True),
        "written": lambda: [apply(*each) for each in zip(deltas, copies, strict=True)],
    }
    taken = in_turn(rounds, sides, before=fresh)
    seconds = {name: statistics.median(each for (each,) in rows) for name, rows in taken.items()}
    gb = sum(each.nbytes for each in weights) / 1e9
    ratio = seconds["compared there"] / seconds["over the host"]
    return {
        "compared there": {"of_the_way_over_the_host": ratio},
        **{f"{name}, gb_per_s": gb / each for name, each in seconds.items()},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 768])
    parser.add_argument("--steps", type=int, default=6, help="at the lowest rate; else 3")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kind")
    add_device(parser)
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if asked.device != "cpu":
        (on_gpu,) = cpu.run_ranks(1, on_device, asked.rounds, device=asked.device, timeout_s=300.0)
        tell(on_gpu, asked.json)
        return
    found = {f"hidden {each}": measure(each, asked.steps) for each in asked.hidden}
    with cpu.RankPool(2) as pool:
        for name in ("disk", "process group"):
            found[f"updates, {name}"] = pool.run(2, updates, name, asked.rounds, timeout_s=300.0)[0]
    tell(found, asked.json)


if __name__ == "__main__":
    main()
