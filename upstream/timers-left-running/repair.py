"""A timer that an exception has left running starts again, with a warning."""

from upstream.edits import Repair, replace

REPAIR = Repair(
    edits=(
        replace(
            "megatron.core.timers:Timer.start",
            "not self._started",
            """
            if self._started:
                # An exception between start() and stop(); that interval does not count.
                logger.warning(f'timer {self.name} was still running, and is started again')
            """,
        ),
    ),
    unit_tests=("pipeline_parallel/test_schedules.py",),
)
