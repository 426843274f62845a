"""The loop: the order of visits, runs that were cut off, several processes, sharded networks."""

import json
import os
import signal
import socket
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.paths import CHECKPOINTS, ROOT
from tests.training.toys import qwen2_network
from vllm_dllm.training import prefix_conditioned as pc
from vllm_dllm.training.data import TrainingError, Visits, load_tokenizer, pad_token_id_of
from vllm_dllm.training.layouts import load_network, released_tensors
from vllm_dllm.training.trainer import DiffusionTrainer, copy_other_files, parse_arguments

MODEL = CHECKPOINTS / "tiny-llada"
STEPS = 50
OPTIONS = (
    "--model", MODEL, "--use-cpu", "--no-bf16", "--positions", 2, "--problems", 60, "--warmup-steps", 0,
    "--learning-rate", 1e-4, "--gradient-accumulation-steps", 1, "--logging-steps", 1, "--save-steps", 20,
    "--disable-tqdm", "true", "--adam-epsilon", 1e-5,
)  # fmt: skip
"""Adam divides small gradients by their size, and the epsilon keeps it from making much of how sums were rounded."""


def words(*options):
    return [str(option) for option in options]


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def weights(folder):
    return load_file(folder / "model.safetensors")


def visits(examples, **changes):
    values = {"draw": lambda example, generator: (example, torch.rand((), generator=generator).item())}
    return Visits(examples, **{**values, "kind": "test", "seed": 0, "count": 12, **changes})


def test_every_epoch_visits_each_example_once_in_another_order_and_draws_anew():
    run = visits(list("abcdef"))
    seen = [run[number] for number in range(12)]
    names = [name for name, _ in seen]
    assert sorted(names[:6]) == sorted(names[6:]) == list("abcdef")
    assert names[:6] != names[6:]
    assert len({number for _, number in seen}) == 12


def test_a_visit_does_not_depend_on_those_before_it():
    run = visits(list("abcdef"))
    whole = [run[number] for number in range(12)]
    assert [visits(list("abcdef"))[number] for number in reversed(range(12))] == whole[::-1]
    assert visits(list("abcdef"), seed=1)[3] != whole[3]
    assert visits(list("abcdef"), kind="other")[3][1] != whole[3][1]


def tune(out, *options):
    pc.main(words(*OPTIONS, "--output-dir", out, *options))


def test_a_resumed_run_ends_in_the_weights_of_one_that_was_not_cut_off(tmp_path, monkeypatch):
    options = ("--max-steps", 8, "--save-steps", 3, "--bf16", "--per-device-train-batch-size", 2)
    tune(tmp_path / "whole", *options)

    def draw(*arguments, **options):
        visited.append(arguments[0])
        if len(visited) > 10:
            raise KeyboardInterrupt
        return pc_draw(*arguments, **options)

    visited, pc_draw = [], pc.draw
    monkeypatch.setattr(pc, "draw", draw)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "cut", *options)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    monkeypatch.undo()
    tune(tmp_path / "cut", *options, "--resume-from-checkpoint", "last")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "cut")[name], tensor), name


KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from transformers import TrainerCallback
from vllm_dllm.training import prefix_conditioned as pc
from vllm_dllm.training.trainer import DiffusionTrainer

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 23:
            os.kill(os.getpid(), signal.SIGKILL)

run = DiffusionTrainer.run

def killed(self):
    self.add_callback(Kill())
    run(self)

DiffusionTrainer.run = killed
pc.main(sys.argv[1:])
"""


def run_two(command, folder):
    """Exit statuses of two ranks that run Python on ``command``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [
        warm.Process(words(*command), stdout=folder / f"rank-{number}", env=env, cwd=ROOT)
        for number, env in enumerate(environments)
    ]
    return [rank.wait(300) for rank in ranks]


@pytest.mark.slow
def test_two_processes_that_were_killed_and_resumed_train_like_one(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    two = words(*OPTIONS, "--output-dir", tmp_path / "two", "--max-steps", STEPS, "--per-device-train-batch-size", 2)
    assert -signal.SIGKILL in run_two([tmp_path / "killed.py", *two], tmp_path)
    assert not (tmp_path / "two" / "model.safetensors").exists()
    resumed = ["-m", "vllm_dllm.training.prefix_conditioned", *two, "--resume-from-checkpoint", "last"]
    assert run_two(resumed, tmp_path) == [0, 0]
    tune(tmp_path / "one", "--max-steps", STEPS, "--per-device-train-batch-size", 4)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert len(losses(tmp_path / "two")) == STEPS
    before = weights(MODEL)
    for name, tensor in weights(tmp_path / "one").items():
        distance = (weights(tmp_path / "two")[name].float() - tensor.float()).norm()
        assert distance <= 0.05 * (tensor.float() - before[name].float()).norm() + 1e-6, name


def test_a_process_that_is_sent_its_weights_reads_none(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_dllm.training.layouts.load_file", None)
    network = load_network(MODEL, weights=False)
    assert network.state_dict().keys() == load_network(MODEL, weights=False).state_dict().keys()


SHARDED = f"""
import os
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from pathlib import Path
from torch import distributed
from torch.distributed.fsdp import fully_shard
from vllm_dllm.training import network as networks
from vllm_dllm.training.layouts import load_network
from vllm_dllm.training.trainer import TrainingBatch, batch_loss

networks.LOSS_ROWS = 5  # fewer than the targets
distributed.init_process_group("gloo")
mesh = distributed.init_device_mesh("cpu", (2,))
plain, sharded = (load_network(Path({str(MODEL)!r})).train() for _ in range(2))
sharded.gradient_checkpointing_enable()
for module in sharded.modules():
    if type(module).__name__ in sharded._no_split_modules:
        fully_shard(module, mesh=mesh)
fully_shard(sharded, mesh=mesh)
ids = torch.arange(12).unsqueeze(0)
mask = torch.tensor([5, 7])
loss, expected = (
    batch_loss(network, TrainingBatch(input_ids=ids, positions=ids % 7, mask=mask, targets=ids + 1))
    for network in (sharded, plain)
)
torch.testing.assert_close(loss, expected)
loss.backward()
expected.backward()
for (name, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=name)
distributed.barrier()
# Now and then a thread of Gloo that asks for the GIL while Python ends aborts the process.
os._exit(0)
"""


@pytest.mark.slow
def test_a_network_in_shards_has_the_same_loss_and_gradients(tmp_path):
    """FSDP2 as Accelerate wraps it, by the layers; Accelerate itself shards on GPUs only."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    assert run_two([tmp_path / "sharded.py"], tmp_path) == [0, 0]


def test_files_of_an_earlier_checkpoint_do_not_stay_beside_new_weights(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    for folder, text in ((source, "new"), (out, "old")):
        folder.mkdir()
        for name in ("config.json", "tokenizer.json", "vocab_mapping.json"):
            (folder / name).write_text(text)
    copy_other_files(source, out)
    assert {path.read_text() for path in out.iterdir()} == {"new"}


def test_a_process_with_several_gpus_is_refused(tmp_path):
    args = parse_arguments(pc.FefArguments, ["--model", "m", "--output-dir", str(tmp_path), "--use-cpu"])
    args._n_gpu = 2
    with pytest.raises(TrainingError, match="one process sees 2 GPUs: start one for each"):
        DiffusionTrainer(torch.nn.Linear(1, 1), args, [], list, 1)


def test_a_run_without_epochs_or_steps_is_refused(tmp_path):
    words = ["--model", "m", "--output-dir", str(tmp_path), "--use-cpu", "--num-train-epochs", "0"]
    with pytest.raises(TrainingError, match=r"--num-train-epochs=0\.0 must be above 0"):
        parse_arguments(pc.FefArguments, words).fix_steps(5)
    assert parse_arguments(pc.FefArguments, [*words, "--max-steps", "3"]).fix_steps(5) == 3 * 2
    with pytest.raises(TrainingError, match="--max-steps=0 must be above 0"):
        parse_arguments(pc.FefArguments, [*words, "--max-steps", "0"]).fix_steps(5)


@pytest.mark.parametrize(("steps", "warmup"), [(20, 18), (53, 47), (500, 50)])
def test_a_short_run_warms_up_in_front_of_the_decay(steps, warmup, tmp_path):
    words = ["--model", "m", "--output-dir", str(tmp_path), "--use-cpu"]
    args = parse_arguments(pc.FefArguments, words)
    pc.decay_over_last_tenth(args, steps)
    assert args.warmup_steps == warmup
    assert warmup + args.lr_scheduler_kwargs["num_decay_steps"] <= steps


def test_padding_is_the_end_of_the_text_where_a_tokenizer_has_none():
    both, end, neither = (
        SimpleNamespace(pad_token_id=pad, eos_token_id=eos) for pad, eos in ((5, 6), (None, 6), (None, None))
    )
    assert (pad_token_id_of(both), pad_token_id_of(end)) == (5, 6)
    with pytest.raises(TrainingError, match="neither a pad_token nor an eos_token"):
        pad_token_id_of(neither)


TOKENIZER = """
from transformers import PreTrainedTokenizer
class OwnTokenizer(PreTrainedTokenizer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
    def get_vocab(self):
        return {"a": 0}
    @property
    def vocab_size(self):
        return 1
"""


def test_a_tokenizer_with_code_of_its_own_is_loaded_without_a_question(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    auto = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto, "tokenizer_class": "OwnTokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert type(load_tokenizer(folder)).__name__ == "OwnTokenizer"


def test_a_tied_head_is_left_out_though_it_is_gathered_apart(tmp_path):
    """As processes do that share a network's parameters."""
    network = qwen2_network(0, vocab_size=12, tie_word_embeddings=True)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    tied, apart = (
        released_tensors(state, {"model_type": "qwen2", "tie_word_embeddings": is_tied}) for is_tied in (True, False)
    )
    assert apart.keys() - tied.keys() == {"lm_head.weight"}
