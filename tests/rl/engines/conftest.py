"""Checkpoints for all tests of engines, made once; and readable failures in the contract."""

import asyncio
import importlib.util

import pytest

pytest.register_assert_rewrite("local_cases", "contract", "contract_base")
if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
elif importlib.util.find_spec("aiohttp") is None:  # of the extra `http`
    collect_ignore_glob = ["test_vllm_*.py"]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """`make_model(seed=1, family="qwen3")` writes a checkpoint once and returns its directory."""
    from tiny import checkpoints

    return checkpoints(tmp_path_factory)


@pytest.fixture
def old(make_model):
    """The checkpoint that an engine is started with."""
    return make_model(family="qwen3")


@pytest.fixture
def new(make_model):
    """The one that it is given."""
    return make_model(family="qwen3", seed=1)


@pytest.fixture
def watched(old):
    """The first one's model, with an eye on its forwards."""
    from local_cases import Watched

    return Watched(old)


@pytest.fixture
def make_engine(watched):
    """`make_engine(max_running=4)` serves that model in this process, until the test ends."""
    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    made = []

    def make(model=None, **settings):
        made.append(TransformersEngine(watched.model if model is None else model, **settings))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.close())


@pytest.fixture
def engine(make_engine):
    """An engine of that model, named "e1"."""
    return make_engine(name="e1")
