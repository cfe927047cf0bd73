import pytest
import torch

from megatron.training.checkpointing import save_checkpoint
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.test_utilities import Utils
from tests.unit_tests.train_utilities import TrainProgram

FOLDER = "iter_0000001/mp_rank_00"
TRACKER = "latest_checkpointed_iteration.txt"


class TestFailureOfOneRank:
    def teardown_method(self, method):
        TrainProgram.destroy()

    @pytest.mark.parametrize(
        "ckpt_format,name",
        [
            ("torch", TRACKER),
            ("torch", f"{FOLDER}/model_optim_rng.pt"),
            ("torch", f"{FOLDER}/distrib_optim.pt"),
            ("torch_dist", TRACKER),
            ("torch_dist", "iter_0000001"),
        ],
    )
    def test_save_raises_on_all_ranks(self, tmp_path_dist_ckpt, ckpt_format, name):
        program = TrainProgram(
            "--bf16", "--use-distributed-optimizer", "--ckpt-format", ckpt_format
        )
        state = (program.model, program.optimizer, program.scheduler)
        program.train(1)
        with TempNamedDir(tmp_path_dist_ckpt / "failed_save") as folder:
            program.args.save = str(folder)
            if Utils.rank == 0:
                path = folder / name
                # A directory in the place of a file, or a file in the place of a directory.
                path.mkdir(parents=True) if path.suffix else path.touch()
            torch.distributed.barrier()
            if Utils.rank == 0:
                with pytest.raises((OSError, RuntimeError)):
                    save_checkpoint(1, *state, 0)
            else:
                with pytest.raises(RuntimeError, match="another rank could not write"):
                    save_checkpoint(1, *state, 0)
            torch.distributed.barrier()
