"""Random students and teachers, and what float64 says of their divergence. Runs on a rank."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from cases import SHAPES, WIDTHS, Case, Truth, U, additions, padded

from megatron_idempotent.logprobs import token_kl

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def case(seed: int, size: int, widths: tuple[int, ...] = WIDTHS) -> Case:
    """A student and a teacher; the same on all ranks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape, local = draw.choice(SHAPES), draw.choice(widths)
    dtype = draw.choice(DTYPES)
    of_teacher = draw.choice([dtype, *DTYPES]) if dtype != torch.float64 else dtype
    apart = draw.choice(["no", "no", "teacher", "student", "both", "shard"])
    # Where supports differ, no probability is too small for float32: what is is as good as none.
    spread = draw.choice([0.1, 1, 4]) if apart in ("teacher", "student") else 50
    student, teacher = torch.randn(2, *shape, local * size, dtype=torch.float64) * spread
    student += draw.choice([0.0, 90.0, -300.0, 1e4])
    teacher += draw.choice([0.0, 90.0, -300.0, 1e4])
    if draw.random() < 0.3:  # next to none
        teacher = student + 1e-3 * torch.randn_like(student)
    vocabulary = local * size - draw.choice([0, 0, min(local, local * size - 1)])
    gone = torch.rand_like(student) < 0.3
    gone[..., 0] = False
    if apart == "shard":
        gone = torch.zeros_like(gone)
        gone.chunk(size, -1)[-1][..., 1 if size == 1 else 0 :] = True
    if apart in ("teacher", "both", "shard"):
        teacher = teacher.masked_fill(gone, -torch.inf)
    if apart in ("student", "both", "shard"):
        student = student.masked_fill(gone, -torch.inf)
    arguments: dict[str, Any] = {
        "direction": draw.choice(["forward", "reverse", "mixed"]),
        "mix": draw.choice([0.0, 0.3, 1.0]),
        "vocab_size": vocabulary,
        "temperature": draw.choice([1.0, 0.7, torch.rand(shape) + 0.5]),
        "workspace_bytes": draw.choice([1, 1000, None]),
        "ownership": draw.choice(["borrow", "consume"]),
    }
    if draw.random() < 0.5:
        arguments["token_mask"] = torch.rand(shape) < draw.choice([0.0, 0.5, 1.0])
    return Case(
        whole=student.to(dtype),
        arguments=arguments,
        layout=draw.choice(["plain", "transposed", "sliced", "gaps"]),
        of_logprob=torch.randn(shape),
        teacher=teacher.to(of_teacher),
    )


def outputs(given: Case, **form: Any) -> dict[str, Any]:
    """Make the call; where there are hidden states, a teacher's rows may lie in another order."""
    part = given.teacher.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    if "hidden" in form and part.dim() > 2 and part.shape[-1] % 2 == 0:
        part = part.transpose(0, 1).contiguous().transpose(0, 1)
    found = token_kl(teacher_logits=part, **form, **given.arguments)
    assert found.student_mass is None
    assert found.teacher_mass is None
    return {"kl": found.kl}


def total(found: dict[str, Any], given: Case) -> Any:
    """The sum that is differentiated; what is infinite has a weight too."""
    return (found["kl"] * given.of_logprob).sum()


def shares(arguments: dict[str, Any]) -> tuple[float, float]:
    """Return those of the forward and of the reverse direction."""
    mix = arguments["mix"]
    known = {"forward": (1.0, 0.0), "reverse": (0.0, 1.0), "mixed": (mix, 1.0 - mix)}
    return known[arguments["direction"]]


def truth(given: Case) -> Truth:
    """Values in float64, and bounds to first order in the unit roundoff u.

    z and y are logits less their largest, by the temperature, with two roundings each, and one of
    the temperature where parts are put together. A summand t·(y - z) has those of exp(y), of y and
    z, of their difference and of the product; sums as many as a term meets additions, and 8. What
    is summed on a rank is no further apart than |y| + |z|.
    """
    arguments, teacher, double = given.arguments, given.teacher, torch.float64
    u = U.get(given.whole.dtype, U[torch.float32])
    computed = torch.finfo(double if u == U[double] else torch.float32)
    if u != U[double]:
        teacher = teacher.float()  # in which it is computed
    size = arguments["vocab_size"]
    temperature = torch.as_tensor(arguments["temperature"], dtype=double)
    if given.whole.dtype != double:
        temperature = temperature.float().double()
    scale = temperature[..., None]
    kept = torch.ones(given.whole.shape[:-1], dtype=torch.bool)
    kept = kept & arguments.get("token_mask", kept)
    sums = additions(size) + 8
    s, z, of_s, log_s = _softmax(given.whole, size, scale, u, sums)
    t, y, of_t, log_t = _softmax(teacher, size, scale, u, sums)
    student, taught = (
        torch.log_softmax(each.double()[..., :size] / scale, -1) for each in (given.whole, teacher)
    )
    apart = torch.where(student == taught, 0.0, taught - student)  # not -inf less -inf
    distance = (y + z).clamp(max=1e15)
    forward, reverse = (
        torch.where(each > computed.smallest_normal, each * sign * apart, 0.0).sum(-1)
        for each, sign in ((t, 1), (s, -1))
    )

    def of_sum(p: Any, own: Any, of_own: Any, of_other: Any, divergence: Any) -> Any:
        summands = p * (distance * (3 * own.clamp(max=1e15) + sums) + 4 * distance)
        found = u * summands.sum(-1) + ((p * distance).sum(-1) + 1) * of_own + of_other
        return found + u * (divergence + 2 * (log_s + log_t))

    of_forward, of_reverse = of_sum(t, y, of_t, of_s, forward), of_sum(s, z, of_s, of_t, reverse)
    parts = [
        (share, value, bound)
        for share, value, bound in zip(
            shares(arguments), (forward, reverse), (of_forward, of_reverse), strict=True
        )
        if share
    ]
    kl = sum(share * value for share, value, _ in parts)
    of_kl = sum(share * bound for share, _, bound in parts) + 2 * u * kl
    live = (kept & kl.isfinite())[..., None]
    weights = (given.of_logprob.double() * kept)[..., None]
    of_p = {
        name: u * (3 * own.clamp(max=1e15) + log_sum[..., None] + 8) + bound[..., None]
        for name, own, log_sum, bound in (("s", z, log_s, of_s), ("t", y, log_t, of_t))
    }
    share, other = shares(arguments)
    gradient = share * (s - t)
    bound = share * (s * of_p["s"] + t * of_p["t"])
    if other:
        inner = torch.where(s > 0, -apart - reverse[..., None], 0.0)
        gradient = gradient + other * s * inner
        size_of = distance + (log_s + log_t + reverse)[..., None]
        error = u * (3 * z + 3 * y).clamp(max=1e15) + 4 * u * size_of + of_reverse[..., None]
        error = error + (of_s + of_t)[..., None]
        bound = bound + other * s * (inner.abs() * (of_p["s"] + 4 * u) + error)
        bound = bound + computed.smallest_normal * distance.clamp(max=1e3)
    out = torch.finfo(given.whole.dtype)
    gradient = torch.where(live, gradient * weights / scale, 0.0)
    bound = (bound + 4 * computed.smallest_normal) * weights.abs() / scale
    bound = bound + (3 * u + out.eps / 2) * gradient.abs() + out.smallest_normal * out.eps
    values = {"kl": torch.where(kept, kl, 0.0), "gradient": gradient}
    bounds = {
        "kl": torch.where(kept & kl.isfinite(), of_kl, 0.0),
        "gradient": torch.where(live, bound, 0.0),
    }
    return padded(values, bounds, given)


def _softmax(whole: Any, size: int, scale: Any, u: float, sums: int) -> tuple[Any, ...]:
    """Probabilities, |z|, the bound of the logarithm of their sum, and that logarithm."""
    logits = whole.double()[..., :size] / scale
    z = (logits.amax(-1, keepdim=True) - logits).clamp(max=1e30)
    p, log_sum = logits.softmax(-1), (-z).exp().sum(-1).log()
    if u == U[torch.float64]:  # torch divides before it subtracts
        z = z + logits.abs().clamp(max=1e15)
    return p, z, u * (3 * (p * z).sum(-1) + sums + log_sum), log_sum


def of_outcomes(
    student_K: Any,
    teacher_K: Any,
    shares: tuple[float, float],
    of_student_K: Any,
    of_teacher_K: Any,
    *,
    renormalized: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """The divergence of K outcomes out of log-probs in float64, its gradient, and a bound of each.

    Returns (divergence, bound, gradient by the student's log-probs, bound). Log-probs that are off
    by so much move a result by its derivatives times that, to first order, and a result of float32
    is rounded once. Outcomes without probability are -inf on both sides.
    """
    u, there_K = U[torch.float32], student_K > -torch.inf
    inputs = [torch.where(there_K, each, 0.0).requires_grad_() for each in (student_K, teacher_K)]
    offs = [torch.where(there_K, each, 0.0) for each in (of_student_K, of_teacher_K)]

    def distribution(logprob_K: Any) -> tuple[Any, Any]:
        if renormalized:
            none = torch.where(there_K, 0.0, -1e30)
            total = (logprob_K + none).logsumexp(-1, keepdim=True)
            logprob_K = logprob_K - torch.where(total > -1e29, total, 0.0)
        return logprob_K.exp() * there_K, logprob_K

    (s, log_s), (t, log_t) = (distribution(each) for each in inputs)
    forward, reverse = shares
    value = ((forward * t - reverse * s) * (log_t - log_s)).sum(-1)

    def moved(derivatives: Any) -> Any:
        pairs = zip(derivatives, offs, strict=True)
        return sum((each.abs() * off).sum(-1) for each, off in pairs)

    derivatives = torch.autograd.grad(value.sum(), inputs, create_graph=True)
    of_each = [
        moved(torch.autograd.grad(one.sum(), inputs, retain_graph=True))
        for one in derivatives[0].unbind(-1)
    ]
    gradient_K = derivatives[0].detach()
    of_gradient_K = torch.stack(of_each, -1) + 2 * u * gradient_K.abs()
    value = value.detach()
    of_value = (moved(derivatives) + 2 * u * value.abs()).detach()
    return value, of_value, gradient_K, of_gradient_K
