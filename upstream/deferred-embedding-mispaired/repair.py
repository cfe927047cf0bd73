"""The deferred gradient pairs inputs with their output gradients, and takes the right weight."""

from upstream.edits import Repair, before, replace

FINISH = "megatron.core.pipeline_parallel.schedules:finish_embedding_wgrad_compute"

REPAIR = Repair(
    edits=(
        replace(
            FINISH,
            "weight = ",
            """
            # A stage with MTP layers also has an embedding, which is another weight.
            weight = embedding_module.output_layer.weight
            if weight is None:
                weight = embedding_module.shared_embedding_or_output_weight()
            """,
        ),
        before(
            FINISH,
            "drain_embedding_wgrad_compute",
            """
            # With MTP layers a microbatch calls the output layer several times. Its backward
            # comes in the reverse order.
            calls = 1 + (config.mtp_num_layers or 0)
            if len(embedding_activation_buffer) % calls:
                raise ValueError(
                    f"wgrad_deferral_limit must be a multiple of {calls}, the calls of the output "
                    f"layer in a microbatch, but is {config.wgrad_deferral_limit}"
                )
            for i in range(0, len(embedding_activation_buffer), calls):
                embedding_activation_buffer[i : i + calls] = embedding_activation_buffer[
                    i : i + calls
                ][::-1]
            """,
        ),
    ),
    unit_tests=("pipeline_parallel/test_schedules.py",),
)
