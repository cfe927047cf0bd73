import pytest
import torch

from megatron.training import checkpointing
from tests.unit_tests.dist_checkpointing import TempNamedDir
from tests.unit_tests.train_utilities import TrainProgram

NAME = "embedding.word_embeddings.weight"


class TestStrictLoad:
    def teardown_method(self, method):
        TrainProgram.destroy()

    @pytest.mark.parametrize(
        "change, strict, error",
        [
            (lambda model: model.pop(NAME), True, f"lacks {NAME}"),
            (lambda model: model.update(other=model[NAME]), True, "has unexpected other"),
            (lambda model: model.update({NAME: model[NAME][::2]}), False, "size mismatch"),
            (lambda model: model.update({"decoder._extra_state": None}), True, None),
            (lambda model: model.pop(NAME), False, None),
        ],
    )
    def test_only_extra_states_may_differ(self, tmp_path_dist_ckpt, change, strict, error):
        program = TrainProgram("--ckpt-format", "torch", "--no-save-optim", "--no-load-optim")
        with TempNamedDir(tmp_path_dist_ckpt / "strict_load") as folder:
            program.args.save = program.args.load = str(folder)
            checkpointing.save_checkpoint(1, program.model, None, None, 0)
            (path,) = folder.glob("iter_*/*/*.pt")
            state_dict = torch.load(path, weights_only=False)
            change(state_dict["model"])
            torch.save(state_dict, path)

            if error is None:
                checkpointing.load_checkpoint(program.model, None, None, strict=strict)
            else:
                with pytest.raises(RuntimeError, match=error):
                    checkpointing.load_checkpoint(program.model, None, None, strict=strict)
