from types import SimpleNamespace

import pytest

from megatron.core import timers


class TestTimerAfterException:
    def step(self, forward):
        self.timers('forward-backward', log_level=1).start()
        forward()
        self.timers('forward-backward').stop()

    def pass_seconds(self, seconds):
        self.now += seconds

    def test_next_interval_starts_again(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timers, 'time', SimpleNamespace(time=lambda: self.now))
        self.timers = timers.Timers(log_level=2, log_option='minmax')

        def unreadable():
            raise ValueError("a microbatch that cannot be read")

        self.step(lambda: self.pass_seconds(1.0))
        with pytest.raises(ValueError, match="cannot be read"):
            self.step(unreadable)
        self.pass_seconds(100.0)
        self.step(lambda: self.pass_seconds(1.0))
        assert self.timers('forward-backward').elapsed() == 2.0
