"""Activation offload takes its plan from a complete schedule with backward passes."""

from upstream.edits import Repair, after, before, last, substitute

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
_MANAGER = f"{_OFFLOAD}:PipelineOffloadManager"

REPAIR = Repair(
    edits=(
        before(
            _MANAGER,
            "def reset(",
            '''
            def start_schedule(self, forward_only: bool):
                """Start a forward-backward schedule, also if the last one raised."""
                if self._is_warmup:
                    # An incomplete record is no plan.
                    self._queue.clear()
                    self._stages = None
                    self._cached_chunks_forward = []
                    self._cached_chunks_backward = []
                self.reset()
                self._forward_only = forward_only

            ''',
        ),
        after(
            f"{_MANAGER}.reset",
            "self._inside_context = False",
            """
            self._forward_only = False
            # Whether no backward will follow the current forward.
            self._no_backward = False
            """,
        ),
        before(
            f"{_MANAGER}.init_model_chunk_offload_handler",
            "if not self._is_warmup",
            """
            self._no_backward = self._forward_only or not torch.is_grad_enabled()
            if self._no_backward:
                self._cur_forward_chunk = None
                return
            """,
        ),
        substitute(
            f"{_MANAGER}.pop_forward_chunk",
            "not self.do_offload",
            "not self.do_offload or self._no_backward",
        ),
        last(
            f"{_OFFLOAD}:ChunkOffloadHandler.reset",
            """
            # A schedule that raised has left tensors that no backward will take.
            for group in self.offload_groups:
                group._tensors.clear()
            """,
        ),
        before(
            f"{_OFFLOAD}:FineGrainedActivationOffloadingInterface",
            "def reset(",
            '''
            @staticmethod
            def start_schedule(forward_only: bool):
                """Start a forward-backward schedule."""
                PipelineOffloadManager.get_instance().start_schedule(forward_only)

            ''',
        ),
        *(
            after(
                f"{_SCHEDULES}:forward_backward_{schedule}",
                "config = get_model_config(",
                """
                if getattr(config, 'fine_grained_activation_offloading', False):
                    off_interface.start_schedule(forward_only)
                """,
            )
            for schedule in (
                "no_pipelining",
                "pipelining_with_interleaving",
                "pipelining_without_interleaving",
            )
        ),
    ),
    unit_tests=(
        "pipeline_parallel/test_fine_grained_activation_offloading.py",
        "pipeline_parallel/test_schedules.py",
    ),
    rereads=(
        # They wrap the schedules, and know each by its text.
        "aux-loss-scale-left-set",
        "decode-padding-left-set",
        "deferred-embedding-leftovers",
        "deferred-embedding-reduced-early",
        "forward-only-counts-tokens",
        "interleaved-sync-funcs-lost",
        "model-never-freed",
        "router-replay-leftovers",
        "timers-left-running",
    ),
)
