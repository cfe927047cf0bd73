from megatron.training import checkpointing
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.train_utilities import TrainProgram


class TestLoadAfterPretrainedCheckpoint:
    def teardown_method(self, method):
        TrainProgram.destroy()

    def test_later_load_resumes(self, tmp_path_dist_ckpt):
        program = TrainProgram("--ckpt-format", "torch")
        state = (program.model, program.optimizer, program.scheduler)
        with TempNamedDir(tmp_path_dist_ckpt / "pretrained_then_resumed") as folder:
            program.args.save = program.args.pretrained_checkpoint = str(folder / "pretrained")
            program.train(1)
            checkpointing.save_checkpoint(1, *state, 0)

            # Nothing to resume yet: begin from the pretrained weights.
            program.args.save = program.args.load = str(folder / "run")
            iteration, _ = checkpointing.load_checkpoint(*state)
            assert iteration == 0
            assert not program.args.finetune

            checkpointing.save_checkpoint(1, *state, 0)
            iteration, _ = checkpointing.load_checkpoint(*state)
            assert iteration == 1
