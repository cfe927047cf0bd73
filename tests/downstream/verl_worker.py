"""verl's Megatron engine on a rank, with its own losses; its data are dictionaries.

Rows go through a small forward step, packs through verl's own.

Legend: B rows, T positions.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import verl_engine
from adapters import PACKED, import_from
from megatron_idempotent.patches.frameworks._verl import ABSENT

from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step import own_positions

#: Lengths of the two sequences of a pack add up to that, and so many tokens of each count: sums
#: over all packs are powers of two, by which a division changes no bits.
PACK, VALID = 32, 8
_REAL = (
    "workers.engine.megatron",  # with a recipe's lines, which come before Megatron
    "utils.torch_functional",
    "trainer.ppo.core_algos",
    verl_engine.WIRING,
    "utils.megatron.pipeline_parallel",
    "utils.megatron.tensor_parallel",
    "models.mcore.util",
    "models.mcore.model_forward",
    "workers.utils.losses",
    verl_engine.BASE,
    verl_engine.MODULE,
)


class Data(dict):  # type: ignore[type-arg]
    """Stands for a TensorDict, as the engine uses it."""

    def to(self, _: Any) -> Data:
        return self


def modules(source: str) -> tuple[Any, Any, Any]:
    """verl's modules of the base, the engine and the losses."""
    imported = import_from(source, "verl", _REAL, *ABSENT, "codetiming")
    _, _, losses, wiring, stages, _, util, forward, sft, base, module = imported.values()
    util.is_npu_available = False
    sft.tu, sft.DatasetPadMode = module.tu, module.DatasetPadMode
    models = sys.modules["verl.models.mcore"]
    models.get_mcore_engine_forward_fn = lambda _: forward.gptmodel_forward_model_engine
    module.extract_multi_modal_inputs = lambda _: {}
    wiring.get_device_id = lambda: "cuda"
    module.tu.get_non_tensor_data = lambda data, key, default=None: data.get(key, default)
    module.tu.assign_non_tensor = lambda data, **values: data.update(values)
    module.prepare_micro_batches = _micro_batches
    module.make_batch_generator = stages.make_batch_generator
    module.postprocess_batch_func = lambda output_lst, **_: {
        "metrics": {},
        "losses": [each["loss"] for each in output_lst],
    }
    for action in ("r2_record", "replay_backward", "replay_forward"):
        setattr(module.RouterReplayHelper, f"is_{action}_action", lambda *_: False)
    return base, module, (losses, wiring, sft)


class VerlWorker:
    """The engine around a small model; an adapter's module makes it use that.

    Example: `VerlWorker(source).train_batch(seed=0, number=4)`
    """

    def __init__(
        self,
        source: str,
        adapter: Any = None,
        *,
        packed: bool = False,
        subject: Any = None,
        **layout: Any,
    ) -> None:
        """Take the chunks and the optimizer of `subject`, or build a small model of a layout."""
        from megatron.core import parallel_state

        base, module, (self.losses, self.wiring, self.sft) = modules(source)
        wiring = self.wiring
        self.packed = packed
        if packed:
            options = {**PACKED["config_overrides"], **layout.get("config_overrides", {})}
            layout = {**PACKED, **layout, "config_overrides": options}
        self.bench = bench = subject or tiny.build(wire=False, **layout)
        wiring.register_megatron_training_hooks(bench.chunks, bench.optimizer)
        self.replica = parallel_state.get_data_parallel_rank()
        lm_head = module.MegatronEngineWithLMHead
        self.engine = verl_engine.engine_of(
            base,
            module,
            bench,
            model_config=SimpleNamespace(
                mtp=SimpleNamespace(enable=False),
                hf_config=SimpleNamespace(architectures=["GPTModel"]),
                tokenizer=SimpleNamespace(pad_token_id=0),
            ),
            engine_config=SimpleNamespace(
                context_parallel_size=bench.config.context_parallel_size,
                dynamic_context_parallel=False,
                pad_bshd_to_minibatch_max=False,
                pad_to_length=False,
                use_fused_kernels=False,
                use_remove_padding=True,
            ),
            **({} if packed else _OF_ROWS),
        )
        plain = type(self.engine)
        for name in _OF_PACKS if packed else ("postprocess_micro_batch_func",):
            setattr(plain, name, getattr(lm_head, name))
        plain._get_context_parallel_layout = staticmethod(lambda _: "zigzag")
        plain.initialize = lambda self: None
        counted = getattr(plain, "_routed_num_tokens", None)  # since #6836
        if counted is not None:
            # A batch on the host is copied to a GPU; here the all-reduce would be of its own
            # offsets.
            plain._routed_num_tokens = lambda self, data: counted(self, data).clone()
        if adapter is not None:
            self.engine.__class__ = type("Engine", (adapter.StepEngine, plain), {})
        self.engine.initialize()

    def data(self, seed: int, number: int) -> Data:
        """`number` microbatches of this replica, in which half of the tokens count."""
        draw = torch.Generator().manual_seed(2 * seed + self.replica)
        if self.packed:
            firsts = torch.randint(VALID + 1, PACK - VALID, (number,), generator=draw).tolist()
            lengths = [each for first in firsts for each in (first, PACK - first)]
            order = [torch.randperm(each - 1, generator=draw) for each in lengths]
            masks = [
                torch.zeros(each).index_fill(0, 1 + o[:VALID], 1)
                for each, o in zip(lengths, order, strict=True)
            ]
            rows = [torch.randint(0, tiny.VOCABULARY, (each,), generator=draw) for each in lengths]
            return Data(input_ids=_jagged(rows), loss_mask=_jagged(masks), temperature=1.0)
        shape = number * tiny.BATCH, tiny.SEQUENCE
        return Data(
            input_ids=torch.randint(0, tiny.VOCABULARY, shape, generator=draw),
            loss_mask=(torch.arange(tiny.SEQUENCE) % 2).expand(shape).float(),
        )

    def parts(self, data: Data, number: int) -> list[Data]:
        """Cut the rows into so many equal parts."""
        return _parts(data, number)

    def train_batch(self, seed: int, number: int) -> Any:
        """verl's own `train_batch`: one call, and its step."""
        return self.engine.train_batch(self.data(seed, number), self.loss)

    def loss(self, model_output: Any, data: Data, dp_group: Any) -> tuple[Any, dict[str, Any]]:
        if self.packed:
            found: tuple[Any, dict[str, Any]] = self.sft.sft_loss(None, model_output, data)
            return found
        loss = self.losses.agg_loss(
            loss_mat=-model_output["log_probs"],
            loss_mask=own_positions(data["loss_mask"]),
            loss_agg_mode="token-mean",
            dp_size=data["dp_size"],
            batch_num_tokens=data["batch_num_tokens"],
        )
        return loss, {"actor/pg_loss": loss.item()}

    def parameters(self) -> bytes:
        bits: bytes = self.bench.bits()
        return bits


def _jagged(rows: Any) -> Any:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def _micro_batches(data: Data, **_: Any) -> tuple[list[Data], None]:
    """Cut the rows into microbatches; refuse rows that are left over, as verl's own does where
    `use_dynamic_bsz` is off.
    """
    number, left_over = divmod(len(data["input_ids"]), tiny.BATCH)
    assert not left_over, "data size must be divisible by micro_batch_size_per_gpu"
    return _parts(data, number), None


def _parts(data: Data, number: int) -> list[Data]:
    size = len(data["input_ids"]) // number

    def part(value: Any, start: int) -> Any:
        if isinstance(value, torch.Tensor) and value.is_nested:
            rows = value.values().split(value.offsets().diff().tolist())
            return _jagged(rows[start : start + size])
        return value[start : start + size] if isinstance(value, torch.Tensor) else value

    starts = range(0, number * size, size)
    return [Data({name: part(value, start) for name, value in data.items()}) for start in starts]


def _forward_step(
    batches: Any, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
) -> tuple[Any, Any]:
    batch = next(batches)
    tokens_BT = batch["input_ids"]
    _, positions_BT, hidden = tiny.inputs(0)
    output = model(
        own_positions(tokens_BT), own_positions(positions_BT), own_positions(hidden, dim=2)
    )
    return output, partial(postprocess_micro_batch_func, data=batch)


def _log_probs(logits_BTV: Any, data: Data) -> dict[str, Any]:
    targets_BT = own_positions(data["input_ids"].roll(-1, 1))
    shards = sys.modules["verl.utils.megatron.tensor_parallel"]
    return {"log_probs": shards.vocab_parallel_log_probs_from_logits(logits_BTV, targets_BT)}


_OF_ROWS = {
    "forward_step": _forward_step,
    "prepare_model_outputs": _log_probs,
    "_routed_num_tokens": lambda data: data["loss_mask"].new_tensor(data["input_ids"].numel()),
}
_OF_PACKS = (
    "forward_step",
    "prepare_model_inputs",
    "prepare_model_outputs",
    "postprocess_micro_batch_func",
    "_lm_head_logits_processor",
)
