import time

import pytest

from megatron.core.timers import Timers


class TestTimerAfterException:
    def setup_method(self, method):
        self.timers = Timers(log_level=2, log_option='minmax')

    def step(self, forward):
        self.timers('forward-backward', log_level=1).start()
        forward()
        self.timers('forward-backward').stop()

    def test_next_interval_starts_anew(self):
        def unreadable():
            raise ValueError("a microbatch that cannot be read")

        self.step(lambda: time.sleep(0.05))
        with pytest.raises(ValueError, match="cannot be read"):
            self.step(unreadable)
        time.sleep(0.5)
        self.step(lambda: time.sleep(0.05))
        assert 0.1 <= self.timers('forward-backward').elapsed() < 0.5
