import pytest
import torch

from megatron.training import checkpointing
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.train_utilities import TrainProgram


class TestCkptStep:
    def teardown_method(self, method):
        TrainProgram.destroy()

    @pytest.mark.parametrize("step", [0, 1])
    def test_optimizer_state_is_of_the_step(self, tmp_path_dist_ckpt, step):
        program = TrainProgram("--bf16", "--ckpt-format", "torch", "--use-distributed-optimizer")
        state = (program.model, program.optimizer, program.scheduler)
        main_params = []
        with TempNamedDir(tmp_path_dist_ckpt / "ckpt_step") as folder:
            program.args.save = program.args.load = str(folder)
            program.train(1)
            for iteration in range(3):
                checkpointing.save_checkpoint(iteration, *state, 0)
                main_params.append([p.clone() for p in program.optimizer.get_parameters()])
                with torch.no_grad():
                    for param in program.optimizer.get_parameters():
                        param.add_(1.0)

            program.args.ckpt_step = step
            iteration, _ = checkpointing.load_checkpoint(*state)
        assert iteration == step
        for expected, loaded in zip(main_params[step], program.optimizer.get_parameters()):
            assert torch.equal(expected, loaded)
