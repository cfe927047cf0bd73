"""A forward pass of the root module begins at rest, also after a pass that raised."""

from upstream.edits import Repair, before

MODULE = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module"

REPAIR = Repair(
    edits=(
        before(
            f"{MODULE}:FsdpModule.pre_forward",
            "is_recomputing = ",
            """
            if self.is_root() and not _is_in_backward():
                modules = list(context.forward_order)
                if any(
                    module.phase is not FsdpModule.Phase.RESTING
                    or (module._unshard_event is not None and module is not self)
                    for module in modules
                ):
                    # The last forward or backward pass raised.
                    for module in modules:
                        module._abandon_pass()
            """,
        ),
        before(
            f"{MODULE}:FsdpModule",
            "def pre_backward(self)",
            '''
            def _abandon_pass(self) -> None:
                """Return to rest from a forward or backward pass that raised."""
                self._phase = FsdpModule.Phase.RESTING
                self._reshard_parameter_groups()
                for group in self._parameter_groups:
                    for fsdp_parameter in group.fsdp_parameters:
                        fsdp_parameter.unsharded.grad = None
                    # zero_grad() of the model saw the parameters of a resharded module only.
                    if any(p.sharded.grad is None for p in group.fsdp_parameters):
                        for fsdp_parameter in group.fsdp_parameters:
                            fsdp_parameter.sharded.grad = None

            ''',
        ),
    ),
    unit_tests=(
        "distributed/mfsdp_v2/test_fully_shard.py",
        "distributed/mfsdp_v2/test_mcore_adapter.py",
    ),
    ranks=2,
)
