"""Reads the names of layouts: how ranks share the model, in which precision; lists the usual ones.

A name is words joined by "-": `tp2-pp2`, `dp2-pp2-vpp2`, `dp2-tp2-distopt`, `ep2-mtp-tied-pp2`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from megatron_idempotent.patching.settings import did_you_mean

LAYERS, EXPERTS = 4, 4
RANKS = 4
"""The most ranks of a layout."""
LossKind = Literal["token", "sequence"]
"""The unit of a loss's mean: positions, or sequences, of which each is a mean over its own."""

#: A word with a number, and what the number counts.
_SIZES = {
    "dp": "replicas, with overlapped reductions of gradients",
    "tp": "tensor-parallel ranks, with sequence parallelism",
    "pp": "pipeline stages",
    "cp": "context-parallel ranks, each with two pieces of every sequence",
    "vpp": "chunks of each stage, interleaved (of pp2, if the name has no pp)",
    "ep": "expert-parallel ranks, among the replicas and the ranks that share a sequence; with "
    "moe. If the name has no dp, there are as many replicas as that takes",
    "etp": "tensor-parallel ranks of each expert, with moe; as many as tp, if the name has no etp",
}
#: A word without a number.
_FLAGS = {
    "moe": "a mixture of 4 experts in each layer, of which a token takes 2, and an auxiliary loss "
    "that balances them",
    "mtp": "a layer that predicts one more token, with a loss of its own; the model has no learned "
    "positions, as Megatron asks",
    "tied": "the output layer shares the embedding's weight",
    "nosp": "no sequence parallelism",
    "nooverlap": "reductions are not overlapped",
    "packs": "sequences of less than a row, of which the adapter makes packs",
    "sequences": "the loss is a mean over sequences of the means over their positions, in the "
    "place of one over positions",
    "distopt": "distributed optimizer, gathers of parameters overlapped too, in float32, because "
    "Megatron's takes no float64",
    "fp32": "float32 in the place of float64, with Adam",
    "fsdp2": "torch's `fully_shard` over dpN ranks, of a model without Megatron",
    "bf16": "bfloat16 with main parameters in float32, with Adam",
    "fp16": "float16 with main parameters in float32 and a constant loss scale, with Adam",
}

WORDS: Mapping[str, str] = MappingProxyType(
    {**{f"{word}N": text for word, text in _SIZES.items()}, **_FLAGS}
)
"""The words of a layout's name, and what each means."""


KINDS = (*_SIZES, *_FLAGS)
"""The same words without numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Describes how a model is spread over ranks, in which precision, and with which loss.

    Example: `layout("tp2-pp2").ranks` is 4.
    """

    name: str
    sizes: Mapping[str, int]
    """The number of each word of `_SIZES`; the default if the name does not have the word."""
    flags: frozenset[str]
    """The words without a number, `moe` among them if the name says `ep` or `etp`."""
    words: frozenset[str]
    """The words that the name says, without their numbers."""

    @property
    def ranks(self) -> int:
        """The number of ranks: data x tensor x pipeline x context parallel."""
        return math.prod(self.sizes[word] for word in ("dp", "tp", "pp", "cp"))

    @property
    def stages(self) -> int:
        """The number of pipeline stages, virtual ones included."""
        return self.sizes["pp"] * self.sizes["vpp"]

    @property
    def replicas(self) -> int:
        """The number of data-parallel ranks, which is the number of replicas of the model."""
        return self.sizes["dp"]

    @property
    def experts(self) -> int:
        """The number of experts of each layer; 0 for a dense model."""
        return EXPERTS if "moe" in self.flags else 0

    @property
    def auxiliary(self) -> bool:
        """True if MoE or MTP layers add losses of their own to the gradient."""
        return bool(self.flags & {"moe", "mtp"})

    @property
    def packs(self) -> bool:
        """True if rows have different lengths, and the adapter trains on packs of such rows."""
        return "packs" in self.flags

    @property
    def plain(self) -> bool:
        """True if a call's rows may be cut into microbatches in any way: no packs, stages,
        auxiliary losses.
        """
        return not (self.packs or self.stages > 1 or self.auxiliary)

    def lacks(self, feature: str) -> str | None:
        """Return the reason why this layout lacks `feature`, such as "replicas", which a check
        needs; None if the layout has the feature.
        """
        has_it, reason = {
            "": (True, ""),
            "replicas": (self.replicas > 1, "one replica"),
            "auxiliary": (self.auxiliary, "no auxiliary losses"),
            "packs": (self.packs, "no packs"),
            "rows": (not self.packs, "which sequences share a pack is the adapter's to choose"),
            "plain": (self.plain, "packs, stages, or losses of a microbatch"),
            "megatron": (not self.fsdp2, "no adapters on FSDP2"),
            "experts": (self.experts > 0, "no experts"),
            "loss scale": (self.dtype == "fp16", "no loss scale"),
        }[feature]
        return None if has_it else reason

    @property
    def loss_kind(self) -> LossKind:
        """The unit over which the loss is a mean: "token" or "sequence"."""
        return "sequence" if "sequences" in self.flags else "token"

    @property
    def fsdp2(self) -> bool:
        """True if the model is a plain torch module on FSDP2, without Megatron."""
        return "fsdp2" in self.flags

    @property
    def dtype(self) -> Literal["fp64", "fp32", "bf16", "fp16"]:
        """The type of the model's parameters, such as "bf16". SGD trains a model in float64, Adam
        trains all others.
        """
        if half := self.flags & {"bf16", "fp16"}:
            return "bf16" if "bf16" in half else "fp16"
        return "fp32" if self.flags & {"distopt", "fp32"} else "fp64"

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of `cpu.tiny.build` that make this layout's model."""
        sharded = "distopt" in self.flags
        return {
            "tp": self.sizes["tp"],
            "pp": self.sizes["pp"],
            "cp": self.sizes["cp"],
            "vpp": self.sizes["vpp"] if self.sizes["vpp"] > 1 else None,
            "sequence_parallel": self.sizes["tp"] > 1 and "nosp" not in self.flags,
            "overlap_grad_reduce": "nooverlap" not in self.flags,
            "distributed_optimizer": sharded,
            "overlap_param_gather": sharded and "nooverlap" not in self.flags,
            "layers_per_stage": LAYERS // self.stages,
            "ep": self.sizes["ep"],
            "etp": self.sizes["etp"] if self.experts else None,
            "experts": self.experts,
            "tied": "tied" in self.flags,
            "dtype": "fp32" if self.dtype == "fp64" else self.dtype,
            "exact_attention": True if self.packs else None,
        }


def layout(name: str) -> Layout:
    """Parse a layout's name, such as `tp2-pp2`, into a `Layout`.

    Raises:
        ValueError: a word is unknown or stands twice, or the model does not fit.
    """
    sizes, flags = dict.fromkeys(_SIZES, 1), set[str]()
    kinds = set[str]()
    for word in name.split("-"):
        match = re.fullmatch(r"([a-z]+)([1-9][0-9]*)", word)
        kind = match[1] if match and match[1] in _SIZES else word
        if kind in kinds:
            raise ValueError(f"the layout {name!r} says {kind!r} twice")
        kinds.add(kind)
        if match and kind != word:
            sizes[kind] = int(match[2])
        elif word in _FLAGS:
            flags.add(word)
        else:
            raise ValueError(
                f"the layout {name!r} has the unknown word {word!r}: words are "
                f"{', '.join(WORDS)}.{did_you_mean(word, WORDS)}"
            )
    if sizes["vpp"] > 1 and "pp" not in kinds:
        sizes["pp"] = 2
    if kinds & {"ep", "etp"}:
        flags.add("moe")
    _share_experts(name, sizes, flags, kinds)
    result = Layout(
        name=name, sizes=MappingProxyType(sizes), flags=frozenset(flags), words=frozenset(kinds)
    )
    if result.ranks > RANKS:
        raise ValueError(f"the layout {name!r} takes {result.ranks} ranks; at most {RANKS} run")
    types = sorted(flags & {"fp32", "bf16", "fp16"})
    if len(types) > 1:
        raise ValueError(f"the layout {name!r} says {' and '.join(types)}: name one type")
    if "fsdp2" in flags and (foreign := kinds - {"fsdp2", "dp", "sequences"}):
        raise ValueError(
            f"the layout {name!r} says {', '.join(sorted(foreign))} of an FSDP2 model, which has "
            "none of that: name it with dpN and sequences alone"
        )
    if sizes["vpp"] > 1 and sizes["pp"] == 1:
        raise ValueError(f"the layout {name!r} interleaves chunks of one stage; that takes two")
    if LAYERS % result.stages:
        raise ValueError(
            f"the layout {name!r} has {result.stages} stages, which do not share {LAYERS} layers"
        )
    return result


def _share_experts(name: str, sizes: dict[str, int], flags: set[str], kinds: set[str]) -> None:
    """Set `etp` and `dp` in `sizes`, in place, if the layout's name lacks them; raise `ValueError`
    if the layout's ranks cannot share the experts evenly.
    """
    if "etp" not in kinds:
        sizes["etp"] = sizes["tp"]
    shared = sizes["ep"] * sizes["etp"]
    sharing = sizes["tp"] * sizes["cp"]
    if "dp" not in kinds and "moe" in flags:
        sizes["dp"] = max(1, shared // sharing)
    ranks = sizes["dp"] * sharing
    if "moe" in flags and ranks % shared:
        raise ValueError(
            f"the layout {name!r} spreads experts over {shared} ranks (ep x etp) of the {ranks} of "
            "a stage (dp x tp x cp): their number must divide that"
        )
    if EXPERTS % sizes["ep"]:
        raise ValueError(f"the layout {name!r} has {sizes['ep']} ranks for {EXPERTS} experts")
    if "moe" in flags and "nosp" in flags and sizes["tp"] > 1:
        raise ValueError(
            f"the layout {name!r} has experts without sequence parallelism, which Megatron does "
            "not train on tensor-parallel ranks: drop nosp"
        )


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        name: layout(name)
        for name in (
            *("dp2", "dp2-distopt", "dp2-packs", "tp2", "vpp2", "dp2-tied-pp2"),
            *("dp2-moe", "dp2-bf16", "cp2", "tp2-ep2-etp1", "mtp-fp16", "dp2-sequences"),
        )
    }
)
"""The layouts that are certified unless others are asked for, by name. All have one GPT of four
layers."""

STATE_LAYOUTS = ("dp2-distopt", "dp2-bf16-distopt", "dp2-fp16-distopt", "ep2-bf16-distopt")
"""The layouts that state is certified in unless others are asked for."""


def resharded(start: Layout, word: str) -> Layout | None:
    """Return a layout that differs from `start` in the size named by `word`, such as "tp" for
    tensor parallel; None if no other size fits.

    1 becomes 2, and any other number 1. Replicas and expert-parallel ranks are doubled if that
    fits, and else halved. A `word` of "" gives the layout itself.
    """
    if not word:
        return start
    if word == "ep" and not start.experts:
        return None
    numbers = {name: start.sizes[name] for name in _SIZES if name in start.words}
    if word == "dp":
        choices = [{"dp": 2 * start.replicas}, {"dp": max(1, start.replicas // 2)}]
    elif word == "ep":
        choices = [{"ep": 2 * start.sizes["ep"]}, {"ep": max(1, start.sizes["ep"] // 2)}]
    else:
        # If possible, on as many ranks as before.
        number = 1 if start.sizes[word] > 1 else 2
        choices = [{word: number, "dp": max(1, start.replicas * start.sizes[word] // number)}]
        choices.append({word: number})
    flags = [name for name in start.name.split("-") if name in _FLAGS]
    for choice in choices:
        changed = {**numbers, **choice}
        words = [f"{name}{size}" for name, size in changed.items()]
        with contextlib.suppress(ValueError):
            target = layout("-".join((*words, *flags)))
            if target.sizes[word] != start.sizes[word]:
                return target
    return None


GRID = (
    *("sequences", "tp2-pp2-bf16-distopt-nooverlap-moe-etp1-mtp-tied"),
    *("dp2-cp2-fp32-nooverlap-ep2-etp2-tied", "tp2-vpp2-packs-fp16-nosp-distopt"),
    *("dp2-vpp2-fp16-moe-etp2-mtp-sequences", "tp2-cp2-packs-bf16-nosp-nooverlap-tied-sequences"),
    *("tp2-pp2-fp32-ep2-etp1-sequences", "dp2-pp2-packs-distopt-tied"),
    *("vpp2-cp2-distopt-nooverlap-moe-etp2-sequences", "tp2-vpp2-fp32-nosp-mtp-tied"),
    *("dp2-tp2-fp16-distopt-nooverlap-ep2-etp1-mtp-tied", "pp2-cp2-bf16-etp2", "tp2-pp2-nosp"),
    *("tp2-vpp2-ep2-etp1-mtp", "dp2-vpp2-bf16-ep2", "fp32-moe", "tp2-cp2-fp16-etp1", "pp2-fp16"),
    *("dp2-tp2-packs-fp32-nosp", "cp2-packs-moe-etp2-mtp", "tp2-packs-ep2-etp1"),
    *("dp4", "tp4", "pp4", "cp4", "ep4"),
)
"""Names of layouts that cover all pairs of words.

For each two words that fit together there is a layout with both, and one with each alone. A fault
seldom needs more than two; all layouts that fit on four ranks are thousands. Four ranks of one kind
leave no room for another kind. FSDP2 is left out, because it is for adapters of its own.

Example: `certify("mine:Adapter", layouts=GRID, checks=["split-step"])`.
"""
