import pytest

from megatron.training.checkpointing import (
    cleanup_old_non_persistent_checkpoint,
    get_checkpoint_tracker_filename,
)


@pytest.mark.parametrize(
    "tracked, kept", [("32", [32, 40]), ("40", [40]), ("40\n", [40]), (None, [40])]
)
def test_cleanup_keeps_the_tracked_checkpoint(tmp_path, tracked, kept):
    for iteration in (30, 32, 40):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    if tracked is not None:
        with open(get_checkpoint_tracker_filename(tmp_path), "w") as tracker:
            tracker.write(tracked)
    cleanup_old_non_persistent_checkpoint(tmp_path)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")) == kept
