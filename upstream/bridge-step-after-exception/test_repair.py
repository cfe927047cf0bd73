from unittest import mock

import pytest
from megatron.core.timers import Timers
from tests.unit_tests.framework_utilities import Off, import_alone

module = import_alone("megatron.bridge.training.train", "modelopt")


class TestTrainStepAfterException:
    @pytest.mark.parametrize("where", ["step", "clip_qk"])
    def test_next_step_starts_the_optimizer_timer_again(self, where):
        names = ("checkpoint", "dataset", "ddp", "optimizer")
        cfg = Off(
            **{name: Off() for name in names},
            dist=Off(use_decentralized_pg=True),
            model=Off(qk_clip=True),
            train=Off(empty_unused_memory_level=0, micro_batch_size=1),
            data_parallel_size=1,
        )
        state = Off(cfg=cfg, timers=Timers(2, "minmax"))
        machine = mock.MagicMock(**{"should_run_forward_backward.return_value": False})
        machine.should_checkpoint_and_exit.return_value = (False, False, 0)
        optimizer, clip_qk = mock.MagicMock(**{"step.return_value": (True, 1.0, 0)}), mock.MagicMock()
        failing = optimizer.step if where == "step" else clip_qk
        arguments = (None, [mock.MagicMock()], optimizer, mock.MagicMock(), state, mock.MagicMock(), None)
        with (
            mock.patch("torch.cuda.synchronize"),
            mock.patch.multiple(
                module,
                clip_qk=clip_qk,
                get_model_config=mock.MagicMock(),
                get_num_microbatches=lambda: 1,
                get_rerun_state_machine=lambda: machine,
                is_pp_last_stage=lambda _: False,
                reduce_max_stat_across_model_parallel_group=mock.MagicMock(),
            ),
        ):
            failing.side_effect = RuntimeError
            with pytest.raises(RuntimeError):
                module.train_step(None, *arguments, None)
            failing.side_effect = None
            module.train_step(None, *arguments, None)
