"""JSON that nothing can be made of is refused by the error of its reader, which names the file."""

import asyncio
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch
from test_output import make_run
from trainer_cases import job_for

from megatron_idempotent.json_text import DEEPEST, parse_json
from megatron_idempotent.rl.controller.status_file import StatusError, read_status
from megatron_idempotent.rl.hf import CheckpointDamaged
from megatron_idempotent.rl.metrics.loggers import read_metrics
from megatron_idempotent.rl.trainer import CheckpointError, DataError, output
from megatron_idempotent.rl.trainer.task import tokenizer
from megatron_idempotent.rl.trainer.task.prompts import read_prompts
from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, WeightUpdate, safetensors_io
from megatron_idempotent.rl.weights import transports as t


def nested(levels: int) -> str:
    return '{"step": ' * levels + "1" + "}" * levels


BUCKET = Bucket.of(0, {"w": torch.arange(100.0)})


@pytest.mark.parametrize(
    "text",
    [nested(100_000), nested(DEEPEST + 1), "9" * 6000, "[1", "\ud800"],
    ids=["deepest", "deep", "long", "cut", "not UTF-8"],
)
@pytest.mark.parametrize(
    ("read", "error"),
    [
        (read_prompts, DataError),
        (read_metrics, ValueError),
        (read_status, StatusError),
        (tokenizer._read, CheckpointError),
        (safetensors_io.read_json, CheckpointDamaged),
        (lambda path: output.verify_checkpoint(path.parent), CheckpointError),
    ],
    ids=["prompts", "metrics", "status", "tokenizer", "weights", "checkpoint"],
)
def test_a_file_is_named_whatever_its_json_is(tmp_path, read, error, text):
    path = output.checkpoint_path(tmp_path, 3) / output.MARKER
    path.parent.mkdir()
    path.write_bytes(text.encode(errors="surrogatepass") + b"\n")
    with pytest.raises(error, match=output.MARKER) as caught:
        read(path)
    assert caught.type is error
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", [nested(100_000), "9" * 6000])
def test_the_controllers_state_and_a_bucket_of_weights_are_named(tmp_path, text):
    out, checkpoints = make_run(tmp_path, 3)
    job = job_for(out, resume=True)
    output.make_empty(output.unfinished_path(checkpoints, 6))
    (output.unfinished_path(checkpoints, 6) / "controller.json").write_text(text)
    output.seal_checkpoint(checkpoints, 6, job.config, digest="")
    from megatron_idempotent.rl.trainer.checkpoint import CheckpointStore

    with pytest.raises(CheckpointError, match=r"rollout-000006/controller.json: "):
        asyncio.run(CheckpointStore(job, ranks=None).restore())

    async def send() -> None:
        sender = t.DiskSender(tmp_path / "sync")
        try:
            receiver = t.receiver(await sender.open(WeightUpdate(id="u", version=1)))
            announced = await sender.announce(BUCKET)
            (path,) = (tmp_path / "sync").glob("*/*.safetensors")
            content = len(text).to_bytes(8, "little") + text.encode()
            path.write_bytes(content)
            receiver.receive({**announced, "file_bytes": len(content)})
        finally:
            await sender.close()

    with pytest.raises(UpdateDamaged, match=r"model-00000.safetensors cannot be read"):
        asyncio.run(send())


@pytest.mark.parametrize("step", ['"3"', "null", "[]"])
def test_a_row_of_metrics_whose_step_is_no_number_is_named(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": {step}}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: damaged \(step is .*, no whole number"):
        read_metrics(path)


def test_what_is_nested_less_is_read():
    text = nested(DEEPEST)
    assert json.dumps(parse_json(text)) == text
