"""Sets up a small GPT and calls `train()`, for unit tests of Megatron's training loop."""

import sys
from unittest import mock

import torch

from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.rerun_state_machine import RerunDataIterator, destroy_rerun_state_machine
from megatron.training import training
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.global_vars import destroy_global_vars, get_args
from megatron.training.initialize import initialize_megatron
from tests.unit_tests.test_utilities import Utils

SEQUENCE = 16
VOCABULARY = 64

ARGS = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant
    --train-iters 1000 --eval-interval 1000 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0
    --transformer-impl local --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
    --make-vocab-size-divisible-by {VOCABULARY} --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --use-cpu-initialization
""".split()


def _model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    return GPTModel(
        config or core_transformer_config_from_args(get_args()),
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def _batches(micro_batch_size):
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    while True:
        shape = (micro_batch_size, SEQUENCE)
        yield torch.randint(0, VOCABULARY, shape, generator=generator).cuda()


def _forward_step(data_iterator, model, *_):
    tokens = next(data_iterator)
    position_ids = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device=tokens.device).tril() < 0.5

    def loss_func(output):
        loss = output.float().mean()
        return loss, {"lm loss": loss.detach()}

    return model(tokens, position_ids, mask, labels=tokens), loss_func


class TrainProgram:
    """A training job of which `train()` can be called several times."""

    def __init__(self, *extra_args):
        destroy_global_vars()
        destroy_rerun_state_machine()
        destroy_num_microbatches_calculator()
        Utils.initialize_distributed()
        extra_args = (*extra_args, "--global-batch-size", str(4 * Utils.world_size))
        with mock.patch.object(sys, "argv", [sys.argv[0], *ARGS, *extra_args]):
            parse_and_validate_args()
            initialize_megatron()
        self.args = get_args()
        self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder,
            model_provider_func=_model,
            checkpointing_context={},
        )
        self.args.train_iters = 0
        self.args.do_train, self.args.do_valid, self.args.do_test = True, False, False
        self.config = training.get_model_config(self.model[0])
        self.data = [RerunDataIterator(_batches(self.args.micro_batch_size)) for _ in self.model]

    def train(self, iterations):
        self.args.train_iters += iterations
        return training.train(
            _forward_step,
            self.model,
            self.optimizer,
            self.scheduler,
            self.data if len(self.data) > 1 else self.data[0],
            None,
            None,
            self.config,
            {},
            None,
        )

    def parameters(self):
        """Return a copy of all parameters of this rank."""
        return [p.detach().clone() for chunk in self.model for p in chunk.parameters()]

    @staticmethod
    def destroy():
        destroy_global_vars()
        destroy_rerun_state_machine()
        destroy_num_microbatches_calculator()
        Utils.destroy_model_parallel()
