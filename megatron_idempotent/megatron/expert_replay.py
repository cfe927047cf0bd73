"""Makes a model's routers choose the experts that an inference engine chose (router replay, R3).

A router gets its experts from Megatron's `RouterReplay` (from 0.16 on). During one forward and its
recomputation in the backward, an object with the microbatch's experts replaces the `RouterReplay`.
So a recomputation uses the experts of its own forward, in any order of backwards, and other models
and MTP heads are not affected.

Legend: B rows, T positions, L layers with routers in the whole decoder, K experts of a token, N
tokens of a router on this rank.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

ROUTED_EXPERTS = "routed_experts"
"""A batch's key for the experts that the engine chose, integers [B, T, L, K]."""

ReplayMode = Literal["off", "measure", "replay"]
"""Modes: ignore the engine's experts; count tokens whose router chooses others; or use them."""

Span = tuple[int, int, int]
"""A sequence whose tokens need routes: its row, its first position, and its end (exclusive)."""

_Output = TypeVar("_Output")


class ExpertReplay:
    """Runs forwards in which a model's MoE routers use given experts instead of choosing them.

    `routed_experts` [B, T, L, K] has, for each token and each decoder layer with a router, K
    different experts, from 0. A token that the engine did not run, such as padding or a sequence's
    last one, has the same number K times: its router chooses for itself. With K = 1 every token has
    a route.

    Where a router would choose the same experts, all bits are as without replay. Auxiliary losses
    come from the router's own scores, and the expert bias counts the replayed experts, as in
    Megatron's own replay.

    Example:
        replay = ExpertReplay(chunks)
        logits = replay.run(chunks[0], routed_experts, lambda: chunks[0](tokens, positions, mask))
    """

    def __init__(
        self, chunks: Sequence[Any], *, mode: ReplayMode = "replay", of: str = "ExpertReplay()"
    ) -> None:
        """Find the routers of the chunks; raise if these routers cannot use given experts.

        Args:
            chunks: this rank's chunks of one model, in any wrappers.
            mode: "measure" only counts the tokens for which a router chooses other experts.
            of: the caller's name, for errors.

        Raises:
            RuntimeError: megatron-core is older than 0.16.
            ValueError: the model has no experts, or its routers do not use a replay.
        """
        from megatron.core.utils import get_model_config

        config = get_model_config(chunks[0])
        _refuse(of, config)
        self._config, self.mode = config, mode
        self.experts, self.topk = int(config.num_moe_experts), int(config.moe_router_topk)
        often = config.moe_layer_freq
        if isinstance(often, int):
            often = [index % often == 0 for index in range(config.num_layers)]
        # Numbers of layers count from 1, over all stages.
        numbers = [number for number, routes in enumerate(often, start=1) if routes]
        self.layers = len(numbers)
        self._routers = {id(chunk): _routers(of, chunk, numbers) for chunk in chunks}
        self._installed: tuple[list[_Replay], list[Any]] | None = None
        self._counts = torch.zeros(2, dtype=torch.int64)

    def run(self, chunk: Any, routed_experts: Tensor, forward: Callable[[], _Output]) -> _Output:
        """Call a forward, in which the chunk's routers use the given experts; return its output.

        Recomputation in the output's backward uses them too. Afterwards, even if either raises,
        routers choose for themselves again; after a backward that raised, from the next `run` or
        `clear` on.

        Args:
            chunk: one of the chunks.
            routed_experts: [B, T, L, K]; with context parallelism for this rank's positions, with
                sequence parallelism for the positions of all ranks.
            forward: a function that calls the chunk with these tokens.

        Raises:
            ValueError: a router has a different number of tokens or experts.
        """
        rank_experts_NLK = self._of_rank(routed_experts)
        routers = self._routers[id(chunk)]
        replays = [_Replay(self, layer, router, rank_experts_NLK) for layer, router in routers]
        self.clear()
        self._install(replays)
        try:
            output = forward()
        finally:
            self.clear()

        def install_again(_: Any) -> None:
            if self._installed is None or self._installed[0] is not replays:
                self.clear()
                self._install(replays)
                # Called when the backward ends.
                torch.autograd.Variable._execution_engine.queue_callback(self.clear)

        for leaf in _pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(install_again)  # type: ignore[no-untyped-call]  # has no types
        return output

    def clear(self) -> None:
        """Let routers choose experts by their own scores again; safe to repeat."""
        if self._installed is not None:
            for replay, replaced in zip(*self._installed, strict=True):
                replay.router.router_replay = replaced
            self._installed = None

    def take_counts(self) -> Tensor:
        """Return two counts of (token, layer) pairs, as float64 [2], and reset them.
        First, the pairs whose router would choose another set of experts than the engine did;
        second, all pairs for which the engine chose experts.

        Recomputation does not count.
        """
        counts, self._counts = self._counts, torch.zeros_like(self._counts)
        return counts.double()

    def fault(
        self, routed_experts: Any, shape: tuple[int, int], spans: Sequence[Span] | None
    ) -> str | None:
        """Return an error text about the given experts of a microbatch; None if they are valid.

        Args:
            routed_experts: the microbatch's experts.
            shape: the microbatch's rows and positions.
            spans: the sequences whose tokens need routes; None to check the shape alone.
        """
        expected_shape = (*shape, self.layers, self.topk)
        remedy = (
            f"give {expected_shape} integers: experts of each token in each layer with a router"
        )
        if routed_experts is None:
            return f"has no {ROUTED_EXPERTS!r}: {remedy}"
        if not isinstance(routed_experts, Tensor) or routed_experts.is_floating_point():
            kind = getattr(routed_experts, "dtype", type(routed_experts).__name__)
            return f"has {ROUTED_EXPERTS!r} of {kind}: {remedy}"
        actual_shape = tuple(routed_experts.shape)
        if actual_shape != expected_shape and (1, *actual_shape) != expected_shape:
            return f"has {ROUTED_EXPERTS!r} of shape {actual_shape}: {remedy}"
        if spans is None:
            return None
        given_BTLK = routed_experts.reshape(expected_shape)
        return self._wrong_number(given_BTLK) or _lacking(_has_route(given_BTLK), spans)

    def _wrong_number(self, given_BTLK: Tensor) -> str | None:
        ordered = given_BTLK.sort(-1).values
        twice_BTL = _has_route(given_BTLK) & (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        wrong_BTL = twice_BTL | (ordered[..., 0] < 0) | (ordered[..., -1] >= self.experts)
        if not wrong_BTL.any():
            return None
        row, position, layer = wrong_BTL.nonzero()[0].tolist()
        return (
            f"has experts {given_BTLK[row, position, layer].tolist()} in {ROUTED_EXPERTS!r} at row "
            f"{row}, position {position}, layer {layer}: give {self.topk} different ones of the "
            f"model's {self.experts}, 0 to {self.experts - 1}"
        )

    def _of_rank(self, routed_experts: Tensor) -> Tensor:
        """Return the experts [N, L, K] of the tokens that routers on this rank see, in their order.

        Routers see positions before rows, and with sequence parallelism only this rank's part.
        """
        given_TBLK = routed_experts.transpose(0, 1)
        if self._config.sequence_parallel:
            from megatron.core import parallel_state

            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
            given_TBLK = given_TBLK.chunk(size)[rank]
        return given_TBLK.flatten(0, 1)

    def _install(self, replays: list[_Replay]) -> None:
        self._installed = replays, [replay.router.router_replay for replay in replays]
        for replay in replays:
            replay.router.router_replay = replay


class _Replay:
    """Replaces the `RouterReplay` of one router, and gives it the experts of one microbatch."""

    #: Megatron's code that clears its own replay reads this list.
    replay_backward_list: ClassVar[list[Tensor]] = []

    def __init__(
        self, replay: ExpertReplay, layer: int, router: Any, rank_experts_NLK: Tensor
    ) -> None:
        self.router = router
        self._replay, self._layer = replay, layer
        self._given_NK = rank_experts_NLK[:, layer]
        self._counted = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and indices [N, K] of the experts that the router is to use.
        They are the given experts, or in mode "measure" the router's own. The signature is that of
        `RouterReplay.get_replay_topk`.
        """
        values_NK, own_NK = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if self._given_NK.shape != own_NK.shape:
            raise ValueError(
                f"layer {self._layer} (number {self.router.layer_number} of the decoder) routes "
                f"{own_NK.shape[0]} tokens to {own_NK.shape[1]} experts each on this rank, and "
                f"{ROUTED_EXPERTS!r} have {self._given_NK.shape[0]} tokens with "
                f"{self._given_NK.shape[1]}: cut them as the tokens are cut"
            )
        given_NK = self._given_NK.to(scores.device, torch.int64)
        routed_N = _has_route(given_NK)
        other_N = (given_NK.sort(-1).values != own_NK.sort(-1).values).any(-1) & routed_N
        if not self._counted:
            self._counted = True
            counts = torch.stack((other_N.sum(), routed_N.sum()))
            self._replay._counts = self._replay._counts.to(counts.device) + counts
        if self._replay.mode == "measure":
            return values_NK, own_NK
        # The same set of experts keeps the router's own order, and so the same bits.
        taken_NK = torch.where(other_N[:, None], given_NK, own_NK)
        return scores.gather(1, taken_NK), taken_NK


def _has_route(experts: Tensor) -> Tensor:
    """Return a mask of the tokens for which the engine chose experts.
    Such a token's K experts are not all the same; with K = 1 the mask is True for every token.
    """
    if experts.shape[-1] == 1:
        return torch.ones(experts.shape[:-1], dtype=torch.bool, device=experts.device)
    return (experts[..., 1:] != experts[..., :1]).any(-1)


def _lacking(routed_BTL: Tensor, spans: Sequence[Span]) -> str | None:
    """Return an error text about the first span, (row, start, stop), in which some token has no
    given experts in some layer; None if there is none. `routed_BTL` is True where experts are
    given.
    """
    for index, (row, start, stop) in enumerate(spans):
        routed_L = routed_BTL[row, start:stop].sum(0)
        if bool((routed_L < stop - start).any()):
            layer = int((routed_L < stop - start).nonzero()[0])
            return (
                f"has routes of {int(routed_L[layer])} tokens in row {index}, layer {layer}, and "
                f"{stop - start} that need one: have the engine return those of prompt and "
                "response, or leave the sample out"
            )
    return None


def _refuse(caller: str, config: Any) -> None:
    """Raise an error if the routers of a model with this config cannot use given experts.
    That is so if the model has no experts, megatron-core is older than 0.16, CUDA graphs are on,
    the routing kernel is fused, or one algorithm routes all tokens together.
    """
    if not getattr(config, "num_moe_experts", None):
        raise ValueError(
            f"{caller} got a model without experts (num_moe_experts is not set), and "
            "router_replay: leave router_replay out"
        )
    if importlib.util.find_spec("megatron.core.transformer.moe.router_replay") is None:
        raise RuntimeError(
            f"{caller}: router_replay needs megatron-core 0.16, whose routers can be given "
            f"experts; found {version('megatron-core')}"
        )
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    graphs = any(getattr(config, name, None) not in (None, False, "none") for name in names)
    kind = config.moe_router_load_balancing_type
    for wrong, option in (
        (config.moe_router_fusion, "moe_router_fusion=True, whose kernel chooses experts"),
        (
            kind in ("sinkhorn", "quantile_balancing"),
            f"moe_router_load_balancing_type={kind!r}, which chooses for all tokens at once",
        ),
        (graphs, "CUDA graphs, which repeat the experts of one microbatch"),
    ):
        if wrong:
            raise ValueError(
                f"{caller} got router_replay for a model with {option}: switch that off"
            )


def _routers(caller: str, chunk: Any, numbers: Sequence[int]) -> list[tuple[int, Any]]:
    """Return a pair (index of the layer in `numbers`, router) for each router of a chunk's decoder.
    `numbers` are the layers that have a router according to the config. Raise `ValueError` if
    another layer has one. Routers of MTP heads are left out.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    modules = list(chunk.modules())
    heads = [head for head in modules if type(head).__name__ == "MultiTokenPredictionLayer"]
    apart = {id(inner) for head in heads for inner in head.modules()}
    routers = []
    for module in modules:
        if isinstance(module, TopKRouter) and id(module) not in apart:
            if module.layer_number not in numbers:
                raise ValueError(
                    f"{caller} got router_replay for a model whose layer {module.layer_number} has "
                    f"a router, where moe_layer_freq puts routers into {list(numbers)}: set "
                    "moe_layer_freq to what the model has"
                )
            routers.append((list(numbers).index(module.layer_number), module))
    return routers
