import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from framework_utilities import import_alone

absent = ("mbridge", "omegaconf", "peft", "tensordict", "transformers")
module = import_alone("verl.utils.checkpoint.megatron_checkpoint_manager", *absent)


class TestLoadOfIncompleteCheckpoint:
    @pytest.fixture(autouse=True)
    def ranks(self):
        torch.distributed.init_process_group("gloo")
        yield
        torch.distributed.destroy_process_group()

    @pytest.mark.parametrize("fault", ["truncated", "unreadable"])
    def test_nothing_is_loaded_on_any_rank(self, fault):
        folder = [None]
        if torch.distributed.get_rank() == 0:
            import tempfile

            folder = [tempfile.mkdtemp()]
            for name in ("model", "optimizer", "extra"):
                dcp.save({"weight": torch.ones(8)}, checkpoint_id=os.path.join(folder[0], name), no_dist=True)
            if fault == "truncated":
                (file,) = Path(folder[0], "optimizer").glob("*.distcp")
                os.truncate(file, file.stat().st_size // 2)
        torch.distributed.broadcast_object_list(folder)
        manager = mock.MagicMock(use_megatron_fsdp=False, peft_cls=None)
        manager._check_dist_checkpoints = lambda paths: module.MegatronCheckpointManager._check_dist_checkpoints(
            manager, paths
        )
        read_metadata = dcp.FileSystemReader.read_metadata
        if fault == "unreadable" and torch.distributed.get_rank() == 1:
            read_metadata = mock.MagicMock(side_effect=PermissionError)
        paths = {
            f"get_{name}_dist_checkpoint_path": lambda path, name=name: os.path.join(path, name)
            for name in ("model", "optimizer", "extra")
        }
        with (
            mock.patch.multiple(module, load_dist_checkpointing=mock.MagicMock(), mpu=mock.MagicMock(), **paths),
            mock.patch.object(dcp.FileSystemReader, "read_metadata", read_metadata),
        ):
            with pytest.raises(RuntimeError, match="cannot be loaded"):
                module.MegatronCheckpointManager.load_checkpoint(manager, folder[0])
            module.load_dist_checkpointing.assert_not_called()
