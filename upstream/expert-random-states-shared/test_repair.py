import torch

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training import checkpointing
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.train_utilities import TrainProgram


class TestRandomStatesOfExpertParallelRanks:
    def teardown_method(self, method):
        TrainProgram.destroy()

    def test_each_rank_resumes_with_its_own(self, tmp_path_dist_ckpt):
        program = TrainProgram(
            "--num-experts",
            "2",
            "--expert-model-parallel-size",
            "2",
            "--ckpt-format",
            "torch_dist",
            "--async-strategy",
            "mcore",
            "--no-save-optim",
            "--no-load-optim",
        )
        saved = {name: s.clone() for name, s in get_cuda_rng_tracker().get_states().items()}
        with TempNamedDir(tmp_path_dist_ckpt / "expert_random_states") as folder:
            program.args.save = program.args.load = str(folder)
            checkpointing.save_checkpoint(1, program.model, None, None, 0)
            with get_cuda_rng_tracker().fork("expert-parallel-rng"):
                torch.rand(1, device="cuda")
            checkpointing.load_checkpoint(program.model, None, None)
        loaded = get_cuda_rng_tracker().get_states()
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
