import os
import shutil

import pytest
import torch

from megatron.training import checkpointing
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.train_utilities import TrainProgram


class TestSpoiltCheckpoint:
    def teardown_method(self, method):
        TrainProgram.destroy()

    @pytest.mark.parametrize(
        "name", ["model_optim_rng.pt", "distrib_optim.pt", "latest_checkpointed_iteration.txt"]
    )
    def test_load_raises_on_all_ranks(self, tmp_path_dist_ckpt, tmp_path, name):
        program = TrainProgram("--bf16", "--ckpt-format", "torch", "--use-distributed-optimizer")
        state = (program.model, program.optimizer, program.scheduler)
        program.train(1)
        rank = torch.distributed.get_rank()
        with TempNamedDir(tmp_path_dist_ckpt / "spoilt_checkpoint") as folder:
            program.args.save = program.args.load = str(folder)
            checkpointing.save_checkpoint(1, *state, 0)
            with torch.no_grad():
                for param in program.model[0].parameters():
                    param.add_(1.0)
            params = program.parameters()

            if name.startswith("latest") and rank == 1:
                # Only this rank sees the invalid tracker file.
                folder = shutil.copytree(folder, tmp_path / "own")
                program.args.load = str(folder)
            torch.distributed.barrier()
            if rank == (1 if name.startswith("latest") else 0):
                (path,) = folder.rglob(name)
                os.truncate(path, path.stat().st_size // 2)
            torch.distributed.barrier()

            with pytest.raises(RuntimeError):
                checkpointing.load_checkpoint(*state)
        assert all(torch.equal(a, b) for a, b in zip(params, program.parameters()))
