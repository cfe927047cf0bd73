"""Has a model's routers take the experts that an inference engine took (router replay, R3).

Megatron's `RouterReplay` (from 0.16 on) is asked by a router for its experts. In its place stands,
for one forward and for what its backward computes again, an object that knows the microbatch: so a
recomputation takes the routes of its own forward, in whatever order a schedule runs backwards, and
neither other models nor MTP heads take any.

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
"""Name in a batch of the experts that the engine took, integers [B, T, L, K]."""

ReplayMode = Literal["off", "measure", "replay"]
"""The use of routed experts: none; counting where a router chooses others; or taking them."""

Span = tuple[int, int, int]
"""A sequence whose tokens need routes: its row, its first position, and the one after its last."""

_Output = TypeVar("_Output")


class ExpertReplay:
    """Runs forwards of a model whose routers take given experts.

    `routed_experts` [B, T, L, K] has, for each token and each decoder layer with a router, K
    different experts, from 0. A token without a route, such as padding or a sequence's last one,
    which no engine ran, has the same number K times: its router chooses itself. With K = 1 there
    is no such token.

    Where a router would take the same experts, all bits are as without replay. Auxiliary losses
    come from the router's own scores, and the expert bias counts the experts that are taken, as in
    Megatron's own replay.

    Example:
        replay = ExpertReplay(chunks)
        logits = replay.run(chunks[0], routed_experts, lambda: chunks[0](tokens, positions, mask))
    """

    def __init__(
        self, chunks: Sequence[Any], *, mode: ReplayMode = "replay", of: str = "ExpertReplay()"
    ) -> None:
        """
        Args:
            chunks: this rank's chunks of one model, in any wrappers.
            mode: "measure" only counts the tokens for which a router takes other experts.
            of: the name of the caller, for errors.

        Raises:
            RuntimeError: a megatron-core before 0.16.
            ValueError: a model without experts, or whose routers do not ask for a replay.
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
        self._put: tuple[list[_Given], list[Any]] | None = None
        self._counts = torch.zeros(2, dtype=torch.int64)

    def run(self, chunk: Any, routed_experts: Tensor, forward: Callable[[], _Output]) -> _Output:
        """Call a forward of a chunk, and have its routers take given experts; return its output.

        Recomputation in the output's backward takes them too. Afterwards, also if either raises,
        routers are as they were: after a backward that raised, from the next `run` or `clear` on.

        Args:
            chunk: one of the chunks.
            routed_experts: [B, T, L, K]: under context parallelism those of this rank's positions;
                under sequence parallelism those of all ranks' positions.
            forward: a function that calls the chunk with these tokens.

        Raises:
            ValueError: another number of tokens or experts than a router has.
        """
        own_NLK = self._own(routed_experts)
        given = [_Given(self, *each, own_NLK) for each in self._routers[id(chunk)]]
        self.clear()
        self._install(given)
        try:
            output = forward()
        finally:
            self.clear()

        def again(_: Any) -> None:
            if self._put is None or self._put[0] is not given:
                self.clear()
                self._install(given)
                # Called when the backward ends.
                torch.autograd.Variable._execution_engine.queue_callback(self.clear)

        for each in _pytree.tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(again)  # type: ignore[no-untyped-call]  # has no types
        return output

    def clear(self) -> None:
        """Have routers choose for themselves again; a no-op if they do."""
        if self._put is not None:
            for each, before in zip(*self._put, strict=True):
                each.router.router_replay = before
            self._put = None

    def take_counts(self) -> Tensor:
        """Return, and reset, how many choices of this rank's routers an engine made otherwise.

        float64 [2]: token-layer pairs for which a router's own choice is another set of experts,
        and all pairs with a route. Recomputation counts nothing.
        """
        found, self._counts = self._counts, torch.zeros_like(self._counts)
        return found.double()

    def fault(
        self, routed_experts: Any, shape: tuple[int, int], spans: Sequence[Span] | None
    ) -> str | None:
        """Describe what is wrong with a microbatch's routes, for an error; None if nothing is.

        Args:
            routed_experts: the microbatch's.
            shape: its rows and positions.
            spans: the sequences whose tokens need routes; None to look at no values.
        """
        wanted = (*shape, self.layers, self.topk)
        told = f"give {wanted} integers: experts of each token in each layer with a router"
        if routed_experts is None:
            return f"has no {ROUTED_EXPERTS!r}: {told}"
        if not isinstance(routed_experts, Tensor) or routed_experts.is_floating_point():
            kind = getattr(routed_experts, "dtype", type(routed_experts).__name__)
            return f"has {ROUTED_EXPERTS!r} of {kind}: {told}"
        found = tuple(routed_experts.shape)
        if found != wanted and (1, *found) != wanted:
            return f"has {ROUTED_EXPERTS!r} of shape {found}: {told}"
        if spans is None:
            return None
        given_BTLK = routed_experts.reshape(wanted)
        return self._wrong_number(given_BTLK) or _lacking(_known(given_BTLK), spans)

    def _wrong_number(self, given_BTLK: Tensor) -> str | None:
        ordered = given_BTLK.sort(-1).values
        twice_BTL = _known(given_BTLK) & (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        wrong_BTL = twice_BTL | (ordered[..., 0] < 0) | (ordered[..., -1] >= self.experts)
        if not wrong_BTL.any():
            return None
        row, position, layer = wrong_BTL.nonzero()[0].tolist()
        return (
            f"has experts {given_BTLK[row, position, layer].tolist()} in {ROUTED_EXPERTS!r} at row "
            f"{row}, position {position}, layer {layer}: give {self.topk} different ones of the "
            f"model's {self.experts}, 0 to {self.experts - 1}"
        )

    def _own(self, routed_experts: Tensor) -> Tensor:
        """Return the experts [N, L, K] of the tokens that this rank's routers see, in their order.

        Routers see positions first and rows second, and under sequence parallelism a rank's part.
        """
        given_TBLK = routed_experts.transpose(0, 1)
        if self._config.sequence_parallel:
            from megatron.core import parallel_state

            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
            given_TBLK = given_TBLK.chunk(size)[rank]
        return given_TBLK.flatten(0, 1)

    def _install(self, given: list[_Given]) -> None:
        self._put = given, [each.router.router_replay for each in given]
        for each in given:
            each.router.router_replay = each


class _Given:
    """Stands in for a router's `RouterReplay` with the experts of one microbatch."""

    #: Read by code that clears what Megatron's own replay keeps.
    replay_backward_list: ClassVar[list[Tensor]] = []

    def __init__(self, replay: ExpertReplay, layer: int, router: Any, own_NLK: Tensor) -> None:
        self.router = router
        self._replay, self._layer = replay, layer
        self._given_NK = own_NLK[:, layer]
        self._counted = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and experts [N, K], as `RouterReplay.get_replay_topk` does."""
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
        known_N = _known(given_NK)
        other_N = (given_NK.sort(-1).values != own_NK.sort(-1).values).any(-1) & known_N
        if not self._counted:
            self._counted = True
            counts = torch.stack((other_N.sum(), known_N.sum()))
            self._replay._counts = self._replay._counts.to(counts.device) + counts
        if self._replay.mode == "measure":
            return values_NK, own_NK
        # Where the set is the same the router's own order stays, and with it all bits.
        taken_NK = torch.where(other_N[:, None], given_NK, own_NK)
        return scores.gather(1, taken_NK), taken_NK


def _known(given: Tensor) -> Tensor:
    """Tell which tokens [...] have a route: not K times the same expert, for K above 1."""
    if given.shape[-1] == 1:
        return torch.ones(given.shape[:-1], dtype=torch.bool, device=given.device)
    return (given[..., 1:] != given[..., :1]).any(-1)


def _lacking(known_BTL: Tensor, spans: Sequence[Span]) -> str | None:
    """Describe the first sequence of which a layer has routes of fewer tokens than need one."""
    for index, (row, start, stop) in enumerate(spans):
        there_L = known_BTL[row, start:stop].sum(0)
        if bool((there_L < stop - start).any()):
            layer = int((there_L < stop - start).nonzero()[0])
            return (
                f"has routes of {int(there_L[layer])} tokens in row {index}, layer {layer}, and "
                f"{stop - start} that need one: have the engine return those of prompt and "
                "response, or leave the sample out"
            )
    return None


def _refuse(of: str, config: Any) -> None:
    """Raise unless routers of a model with this config ask a replay for their experts."""
    if not getattr(config, "num_moe_experts", None):
        raise ValueError(
            f"{of} got a model without experts (num_moe_experts is not set), and router_replay: "
            "leave router_replay out"
        )
    if importlib.util.find_spec("megatron.core.transformer.moe.router_replay") is None:
        raise RuntimeError(
            f"{of}: router_replay needs megatron-core 0.16, whose routers can be given experts; "
            f"found {version('megatron-core')}"
        )
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    graphs = any(getattr(config, name, None) not in (None, False, "none") for name in names)
    kind = config.moe_router_load_balancing_type
    for wrong, told in (
        (config.moe_router_fusion, "moe_router_fusion=True, whose kernel chooses experts"),
        (
            kind in ("sinkhorn", "quantile_balancing"),
            f"moe_router_load_balancing_type={kind!r}, which chooses for all tokens at once",
        ),
        (graphs, "CUDA graphs, which repeat the experts of one microbatch"),
    ):
        if wrong:
            raise ValueError(f"{of} got router_replay for a model with {told}: switch that off")


def _routers(of: str, chunk: Any, numbers: Sequence[int]) -> list[tuple[int, Any]]:
    """Return the routers of a chunk's decoder, each with its place among all of the model's."""
    from megatron.core.transformer.moe.router import TopKRouter

    modules = list(chunk.modules())
    heads = [each for each in modules if type(each).__name__ == "MultiTokenPredictionLayer"]
    apart = {id(inner) for head in heads for inner in head.modules()}
    found = []
    for module in modules:
        if isinstance(module, TopKRouter) and id(module) not in apart:
            if module.layer_number not in numbers:
                raise ValueError(
                    f"{of} got router_replay for a model whose layer {module.layer_number} has a "
                    f"router, where moe_layer_freq puts routers into {list(numbers)}: set "
                    "moe_layer_freq to what the model has"
                )
            found.append((list(numbers).index(module.layer_number), module))
    return found
