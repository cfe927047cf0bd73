from functools import lru_cache
from unittest import mock

from tests.unit_tests.framework_utilities import Off, import_alone

real = ("megatron.bridge.utils.import_utils",)
module = import_alone("megatron.bridge.training.checkpointing", "modelopt", real=real)


class TestLoadTwice:
    def test_each_load_reads_the_files(self):
        read = []

        @lru_cache
        def read_train_state(name):
            read.append(name)

        @lru_cache
        def read_run_config(name):
            read.append(name)

        def load_base(*args, **kwargs):
            module.read_train_state("latest_train_state.pt")
            module.read_run_config("run_config.yaml")
            raise FileNotFoundError

        state = Off(cfg=Off(checkpoint=Off(ckpt_format="torch_dist")))
        with mock.patch.multiple(
            module,
            _load_base_checkpoint=load_base,
            get_pg_collection=mock.MagicMock(),
            is_hf_checkpoint_dir=lambda _: False,
            read_run_config=read_run_config,
            read_train_state=read_train_state,
            unwrap_model=lambda model: model,
        ):
            for _ in range(2):
                try:
                    module._load_checkpoint_from_path("folder", state, [], None, None)
                except FileNotFoundError:
                    pass
        assert read == ["latest_train_state.pt", "run_config.yaml"] * 2
