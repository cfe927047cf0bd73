"""Tests that are coroutines run in an event loop of their own, and not for ever."""

from __future__ import annotations

import asyncio
import inspect

import pytest

pytest.register_assert_rewrite("recovery_cases")
DEADLINE_S = 120.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Await a test that is a coroutine; pytest calls all others."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), DEADLINE_S))
    return True
