"""Plain attention in float64, and what bounds the roundings of any other.

Legend: N heads, B rows, K keys, Q queries, D channels.
"""

import math

import torch


def plain(tensors, lengths, visible, scale, sink=False):
    """Attention of each sequence by itself, in float64, with what bounds its roundings.

    Returns ([output, gradients of query, key, value], [a magnitude of each], terms). Each is a sum
    of products, and computed with roundings of u it is off by less than `terms * u` of the same
    sums with all terms positive: a score by D + 2 roundings of its terms, which the exponential
    makes relative errors of the probabilities, which have K + 4 of their own; then sums over K, Q
    and D terms follow.
    """
    query, key, value, upstream = (each.double() for each in tensors)
    repeats = query.shape[2] // key.shape[2]
    found = [torch.zeros_like(each) for each in (upstream, query, key, value)]
    sizes = [torch.zeros_like(each) for each in found]
    terms, channels = 0.0, query.shape[3]
    for start, length in lengths:
        if not length:
            continue
        place = slice(start, start + length)
        q, k, v, do = (each[place].transpose(0, 2) for each in (query, key, value, upstream))
        k, v = (each.repeat_interleave(repeats, dim=0) for each in (k, v))  # [N, B, K, D]
        scores = (q @ k.transpose(2, 3)) * scale
        scores = scores.masked_fill(~visible(length), -math.inf)
        if sink:
            scores = torch.cat([scores, scores.new_zeros(*scores.shape[:3], 1)], dim=-1)
        p = torch.softmax(scores, dim=-1)[..., :length]
        dp = do @ v.transpose(2, 3)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        across = do.abs() @ v.abs().transpose(2, 3)
        ds_size = p * (across + (p * across).sum(-1, keepdim=True))
        largest = float((q.abs() @ k.abs().transpose(2, 3)).max()) * scale
        terms = max(terms, 2 * (channels + 2) * largest + 4 * length + 2 * channels + 64)

        def grouped(each):
            return each.unflatten(0, (-1, repeats)).sum(1)

        for into, tensor in zip(
            (*found, *sizes),
            (
                *(p @ v, ds @ k * scale),
                *(grouped(ds.transpose(2, 3) @ q * scale), grouped(p.transpose(2, 3) @ do)),
                *(p @ v.abs(), ds_size @ k.abs() * scale),
                grouped(ds_size.transpose(2, 3) @ q.abs() * scale),
                grouped(p.transpose(2, 3) @ do.abs()),
            ),
            strict=True,
        ):
            into[place] += tensor.transpose(0, 2)
    return found, sizes, terms
