"""The backend that the parts of a step's contract run on."""

from __future__ import annotations

from typing import Any

from scenario import Bench, raised_by


class Backend:
    """A backend's class names its engine and the options of its model."""

    engine = "megatron"
    layout: dict[str, Any] = {}  # noqa: RUF012  each class has its own

    def bench(self, *, step: dict[str, Any] | None = None, loss: Any = None, **options: Any) -> Any:
        """A small model of this backend with a step; `step` are options of the latter."""
        return Bench(self.engine, step=step, loss=loss, **{**self.layout, **options})

    @property
    def fsdp(self) -> bool:
        return self.engine == "fsdp"

    @property
    def coupled(self) -> bool:
        """Tell whether ranks meet inside of each microbatch, and so wait for each other."""
        return self.fsdp or bool(self.layout.keys() & {"pp", "tp", "ep"})

    @property
    def has_losses(self) -> bool:
        """Tell, on a rank, whether the model's last stage is on it."""
        if self.fsdp:
            return True
        from megatron.core import parallel_state

        last: bool = parallel_state.is_pipeline_last_stage()
        return last


def refused(error: type[Exception], name: str, call: Any, *args: Any, **kwargs: Any) -> str:
    """Require that a call raises an error of exactly this type that has the name; its text."""
    told = raised_by(call, *args, **kwargs)
    assert type(told) is error, (name, told)
    assert name in str(told), (name, told)
    return str(told)
