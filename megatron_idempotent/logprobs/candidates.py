"""Of a sampler's candidates, those that it kept: the same on all ranks that share the vocabulary.

A rank's highest logits are its candidates. All ranks see all of them, with one all-gather, and so
find the same boundary; where more columns than were sent might lie above it, whole rows are sent.
Legend: n, b some of N tokens, R ranks, C candidates of a rank, W of all, E kept columns here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .combine import Whole
from .kept import Call, Kept
from .kernels import Columns, accumulated, partial_of, place_of, temperature_of
from .rows import rows_of_a_block
from .sampling import columnwise, finite

#: Of what is computed in float64 on all ranks' candidates.
_CHUNK_BYTES = 16 << 20
_AT_A_TIME = 6
#: Besides candidates: the highest logit, the mass of all, and the target's logit.
_SENT = 3


class _Rows(NamedTuple):
    """Some tokens: what is known of all ranks' candidates, in float64, and what this rank has."""

    token: slice | Tensor
    logits_nW: Tensor
    target_n: Tensor
    mass_n: Tensor | None
    beyond_n: Tensor | None
    """No column that was not sent has a higher logit; None where all were sent."""
    here_nC: Tensor
    column_nC: Tensor | None
    """Of `here_nC`; None where they are all columns in order."""


def choose(call: Call) -> tuple[Kept, Whole]:
    """What top-k and top-p leave, and statistics over it.

    A collective of the group's ranks, one all-gather of 4 · (3 + C) bytes per token and rank, and
    one more per block of tokens for which candidates do not suffice.
    """
    dtype = accumulated(call.source.dtype)
    like_N = torch.zeros(len(call.local), dtype=dtype, device=call.local.device)
    whole = Whole(*(like_N.clone() for _ in range(4)))
    kept: list[Kept] = []

    def settle(rows: _Rows) -> Tensor:
        """Whether it is settled for each of them."""
        temperature = temperature_of(call.temperature, rows.token)
        threshold_n, enough_n = call.sampling.thresholds(
            rows.logits_nW, rows.mass_n, rows.beyond_n, temperature
        )
        also_n = rows.target_n < threshold_n
        if call.sampling.target != "keep":
            also_n.zero_()
        found = _statistics(rows, threshold_n, also_n, temperature)
        for into, found_n in zip(whole, found, strict=True):
            into[rows.token] = found_n.to(dtype)
        kept.extend(_here(call, rows, threshold_n, also_n, enough_n))
        return enough_n

    enough = [settle(rows) for rows in _sent(call)]
    if enough:
        for rows in _gathered(call, torch.cat(enough).logical_not().nonzero().squeeze(1)):
            settle(rows)
    return Kept.joined(kept, like_N), whole


def _sent(call: Call) -> Iterator[_Rows]:
    """Every token, with its candidates."""
    local_N, columns = call.local, call.columns
    dtype = accumulated(call.source.dtype)
    width = min(call.sampling.width(), columns.per_rank)
    mine = min(width, columns.real)
    sent_NS = torch.full(
        (len(local_N), _SENT + width), -torch.inf, dtype=dtype, device=local_N.device
    )
    sent_NS[:, 1] = 0
    column_NC = local_N.new_zeros(len(local_N), mine)
    for tokens, logits_nV in call.source.parts() if mine else ():
        values_nC, column_NC[tokens] = logits_nV.topk(mine, -1)
        sent_nS = sent_NS[tokens]
        sent_nS[:, 0] = values_nC[:, 0]
        sent_nS[:, 2] = _target(logits_nV, local_N[tokens], columns)
        sent_nS[:, _SENT : _SENT + mine] = values_nC
        if call.sampling.top_k <= 0:  # top-p is of all columns then
            temperature = temperature_of(call.temperature, tokens)
            wanted = call.wanted._replace(entropy=False)
            part = partial_of(logits_nV, local_N[tokens], None, temperature, columns, wanted)
            sent_nS[:, 1] = part.exponentials
    sent_RNS = _all_gather(sent_NS, columns.group)
    unsent = [columns.real_of(rank) > width for rank in range(columns.ranks)]
    step = rows_of_a_block(columns.ranks * width, _CHUNK_BYTES, _AT_A_TIME, torch.float64)
    for start in range(0, len(local_N), step):
        tokens = slice(start, min(start + step, len(local_N)))
        sent_RnS = sent_RNS[:, tokens].double()
        maximum_Rn, mass_Rn, target_Rn = sent_RnS[..., :_SENT].unbind(-1)
        z_Rn = maximum_Rn - finite(maximum_Rn.amax(0))
        z_Rn /= temperature_of(call.temperature, tokens)
        yield _Rows(
            token=tokens,
            logits_nW=sent_RnS[..., _SENT:].transpose(0, 1).flatten(1),
            target_n=target_Rn.gather(0, call.owner[None, tokens]).squeeze(0),
            mass_n=torch.where(mass_Rn == 0, 0.0, mass_Rn * z_Rn.exp()).sum(0),
            beyond_n=sent_RnS[unsent][..., -1].amax(0) if any(unsent) else None,
            here_nC=sent_NS[tokens, _SENT : _SENT + mine],
            column_nC=column_NC[tokens],
        )


def _gathered(call: Call, short_S: Tensor) -> Iterator[_Rows]:
    """Some tokens, with all logits. Which ones, all ranks know alike."""
    columns = call.columns
    width = columns.ranks * columns.per_rank
    step = rows_of_a_block(width, _CHUNK_BYTES, _AT_A_TIME, torch.float64)
    for start in range(0, len(short_S), step):
        token_b = short_S[start : start + step]
        here_bV = call.source.of(token_b).to(accumulated(call.source.dtype))
        sent_bS = here_bV.new_full((len(token_b), 1 + columns.per_rank), -torch.inf)
        sent_bS[:, 0] = _target(here_bV, call.local[token_b], columns)
        sent_bS[:, 1 : 1 + columns.real] = here_bV
        sent_RbS = _all_gather(sent_bS, columns.group).double()
        yield _Rows(
            token=token_b,
            logits_nW=sent_RbS[..., 1:].transpose(0, 1).flatten(1),
            target_n=sent_RbS[..., 0].gather(0, call.owner[None, token_b]).squeeze(0),
            mass_n=None,
            beyond_n=None,
            here_nC=here_bV,
            column_nC=None,
        )


def _statistics(
    rows: _Rows, threshold_n: Tensor, also_n: Tensor, temperature: Tensor | float
) -> Whole:
    """In float64, and from what all ranks have alike, so that they find the same bits."""
    logits_nW, target_n = rows.logits_nW, rows.target_n
    maximum_n = logits_nW.amax(-1)
    behind_n = finite(maximum_n)
    z_nW = (logits_nW - behind_n[:, None]) / columnwise(temperature)
    kept_nW = (logits_nW >= threshold_n[:, None]) & (logits_nW > -torch.inf)
    mass_nW = torch.where(kept_nW, z_nW.exp(), 0.0)
    target_z_n = (target_n - behind_n) / temperature
    target_mass_n = torch.where(also_n, target_z_n.exp(), 0.0)
    sum_n = mass_nW.sum(-1) + target_mass_n
    moment_n = torch.where(kept_nW, mass_nW * z_nW, 0.0).sum(-1)
    moment_n += torch.where(target_mass_n > 0, target_mass_n * target_z_n, 0.0)
    log_sum_n = sum_n.log()
    logprob_n = target_z_n - log_sum_n
    logprob_n = torch.where((target_n >= threshold_n) | also_n, logprob_n, -torch.inf)
    return Whole(
        maximum=maximum_n,
        log_sum=log_sum_n,
        logprob=torch.where(maximum_n.isnan(), maximum_n, logprob_n),
        entropy=log_sum_n - moment_n / sum_n,
    )


def _here(
    call: Call, rows: _Rows, threshold_n: Tensor, also_n: Tensor, enough_n: Tensor
) -> Iterator[Kept]:
    """This rank's columns among those that were kept."""
    local_N, here_nC = call.local, rows.here_nC
    kept_nC = (here_nC >= threshold_n[:, None]) & (here_nC > -torch.inf) & enough_n[:, None]
    row_e, slot_e = kept_nC.nonzero().unbind(1)
    if isinstance(rows.token, slice):
        token_n = torch.arange(rows.token.start, rows.token.stop, device=local_N.device)
    else:
        token_n = rows.token
    column_e = slot_e if rows.column_nC is None else rows.column_nC[row_e, slot_e]
    yield Kept(token_n[row_e], column_e, here_nC[row_e, slot_e])
    _, ours_n1 = place_of(local_N[rows.token], call.columns.real)
    (row_e,) = (ours_n1.squeeze(1) & also_n & enough_n).nonzero(as_tuple=True)
    token_e = token_n[row_e]
    yield Kept(token_e, local_N[token_e], rows.target_n[row_e].to(here_nC.dtype))


def _target(logits_nV: Tensor, local_n: Tensor, columns: Columns) -> Tensor:
    """Its logit; -inf where its column is another rank's."""
    if not columns.real:
        return logits_nV.new_full((len(logits_nV),), -torch.inf)
    place_n1, ours_n1 = place_of(local_n, columns.real)
    return torch.where(ours_n1, logits_nV.gather(1, place_n1), -torch.inf).squeeze(1)


def _all_gather(sent: Tensor, group: Any) -> Tensor:
    """[n, S] as [R, n, S]."""
    if group is None or dist.get_world_size(group) == 1:
        return sent[None]
    found = sent.new_empty(dist.get_world_size(group), *sent.shape)
    dist.all_gather_into_tensor(found.view(-1, sent.shape[-1]), sent, group=group)
    return found
