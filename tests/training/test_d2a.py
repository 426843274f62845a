"""D2A alignment: the objectives, what a drafter sees, the runs, conversion, acceptance and the commands."""

import json
import math
import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM
from typer.testing import CliRunner

from tests.engine.shared import started_quickly
from tests.paths import CHECKPOINTS
from tests.training.toys import config_of, qwen2_network
from vllm_dllm.tiny import train as tiny
from vllm_dllm.tiny.arithmetic import HELD_OUT_SEED, make_problems
from vllm_dllm.tiny.objectives import causal_mask
from vllm_dllm.tiny.text import SPECIAL_TOKENS, train_tokenizer
from vllm_dllm.training import d2a
from vllm_dllm.training.alignment import DrafterIds, Draw, draw_distill, draw_pretrain, draw_refine, lay_out, truncate
from vllm_dllm.training.answers import read_answers
from vllm_dllm.training.conversion import convert_checkpoint
from vllm_dllm.training.data import Example, Visits, load_tokenizer, read_records
from vllm_dllm.training.evaluation import method_of, speculate
from vllm_dllm.training.layouts import load_network, read_config
from vllm_dllm.training.network import build_network
from vllm_dllm.training.regeneration import complete, regenerate
from vllm_dllm.training.trainer import batch_loss, parse_arguments

MASK, SEP, PAD = 9, 8, 7
CONTEXTS = ("causal", "full")
EXAMPLES = [Example(torch.arange(start, start + length) % 7, 2) for start, length in enumerate((6, 9, 7, 8, 6, 10))]


def ids(context="causal", sep=SEP):
    return DrafterIds(mask=MASK, sep=sep, context=context)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def toy_network(seed=0, vocab_size=10, tied=True):
    network = qwen2_network(seed, vocab_size=vocab_size, tie_word_embeddings=tied)
    with torch.no_grad():  # biases and norms that would be noticed if they were lost
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return network


def arguments(stage, folder, *words):
    needed = ("--model", "drafter", "--output-dir", folder, "--use-cpu")
    return parse_arguments(d2a.ARGUMENTS[stage], [str(word) for word in (*needed, *words)])


def visits(stage, folder, *words, examples=EXAMPLES, end_token_ids=None):
    args = arguments(stage, folder, "--draws", 3, *words)
    draw = partial(d2a.draw_visit, args=args, pad_token_id=PAD, end_token_ids=end_token_ids)
    return Visits(examples, draw, stage, 0, 1000)


# --- the draws ---------------------------------------------------------------------------------------------------


def test_answers_are_cut_off_uniformly_and_prompts_never():
    lengths = [len(truncate(EXAMPLES[0], generator(seed)).tokens) for seed in range(400)]
    for length in (3, 4, 5, 6):
        assert lengths.count(length) / 400 == pytest.approx(1 / 4, abs=0.08)


def test_stage_one_masks_answer_tokens_at_a_uniform_rate_with_weights_of_one_over_t_and_length():
    example = Example(torch.arange(7), 2)
    shares = {length: [] for length in range(1, 6)}
    total = 0.0
    for seed in range(3000):
        draw = draw_distill(example, generator(seed))
        length = len(draw.tokens) - 2
        assert not draw.masked[:2].any()
        assert torch.equal(draw.tokens, example.tokens[: len(draw.tokens)])
        assert torch.equal(draw.weights > 0, draw.masked)
        if draw.masked.any():
            assert len(set(draw.weights[draw.masked].tolist())) == 1
            rate = 1 / (float(draw.weights[draw.masked][0]) * length)
            assert 1e-3 <= rate <= 1
        shares[length].append(int(draw.masked.sum()))
        total += float(draw.weights.sum())
    # E[1 / (t L) x masked tokens] is 1, and a uniform rate makes every number of masked tokens as likely.
    assert total / 3000 == pytest.approx(1.0, abs=0.15)
    for length, counts in shares.items():
        for number in range(length + 1):
            assert counts.count(number) / len(counts) == pytest.approx(1 / (length + 1), abs=0.08)


def test_diffusion_training_masks_whole_answers():
    example = Example(torch.arange(7), 2)
    counts = []
    for seed in range(1200):
        draw = draw_pretrain(example, generator(seed))
        assert torch.equal(draw.tokens, example.tokens)
        assert not draw.masked[:2].any()
        counts.append(int(draw.masked.sum()))
    for number in range(6):
        assert counts.count(number) / 1200 == pytest.approx(1 / 6, abs=0.05)


@pytest.mark.parametrize(("answer", "longest"), [(26, 8), (8, 8), (5, 5)])
def test_stage_two_masks_the_last_r_tokens_with_r_uniform_up_to_the_limit_or_the_answer(answer, longest):
    """So that the mean of R is that of the paper's U(1, 96) wherever an answer has 96 tokens."""
    example = Example(torch.arange(4 + answer), 4)
    counts, lengths = [], {}
    for seed in range(2000):
        draw = draw_refine(example, 1.01, 8, generator(seed))
        count = int(draw.masked.sum())
        assert draw.masked[-count:].all()
        counts.append(count)
        lengths.setdefault(count, set()).add(len(draw.tokens) - 4)
    for count in range(1, longest + 1):
        assert counts.count(count) / 2000 == pytest.approx(1 / longest, abs=0.04)
        assert lengths[count] == set(range(count, answer + 1))


def test_weights_of_stage_two_fall_by_alpha_from_the_prefix_on():
    example = Example(torch.arange(30), 4)
    for seed in range(20):
        draw = draw_refine(example, 1.04, 96, generator(seed))
        count = int(draw.masked.sum())
        expected = [1.04 ** (count - i) / count for i in range(1, count + 1)]
        assert draw.weights[draw.masked].tolist() == pytest.approx(expected)
        assert not draw.weights[~draw.masked].any()


# --- what a drafter sees -----------------------------------------------------------------------------------------


def loss_one_by_one(network, examples, drafter):
    """Both objectives by their definition: one draw at a time, the attention spelled out row by row."""
    losses = []
    for draws in examples:
        for draw in draws:
            tokens = [MASK if hidden else int(token) for token, hidden in zip(draw.tokens, draw.masked, strict=True)]
            first = tokens.index(MASK) if MASK in tokens else len(tokens)
            if drafter.sep is not None:
                tokens.append(drafter.sep)
            mask = torch.zeros(1, len(tokens), len(tokens), dtype=torch.bool)
            for query in range(len(tokens)):
                for key in range(len(tokens)):
                    mask[0, query, key] = drafter.context == "full" or query >= first or key <= query
            row = torch.tensor([tokens])
            logits = network(row, torch.arange(len(tokens)).unsqueeze(0), mask, torch.ones_like(row, dtype=torch.bool))
            total = torch.zeros(())
            for position in range(len(draw.tokens)):
                if draw.masked[position]:
                    loss = F.cross_entropy(logits[position - 1], draw.tokens[position])
                    total = total + draw.weights[position] * loss
            losses.append(total)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("sep", [SEP, None], ids=["sep", "no-sep"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("stage", d2a.ARGUMENTS)
def test_loss_and_gradients_are_those_of_one_draw_at_a_time(stage, context, sep, tmp_path):
    drafter = ids(context, sep)
    run = visits(stage, tmp_path, "--padding", 2)
    for step in range(3):
        examples = [run[2 * step], run[2 * step + 1]]
        network, plain = toy_network(), toy_network()
        loss = batch_loss(network, lay_out(examples, drafter))
        expected = loss_one_by_one(plain, examples, drafter)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        for (name, one), other in zip(network.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_losses_of_a_few_rows_at_a_time_are_those_of_all(monkeypatch):
    draws = [[draw_refine(example, 1.01, 5, generator(number))] for number, example in enumerate(EXAMPLES)]
    batch, together, apart = lay_out(draws, ids()), toy_network(), toy_network()
    apart.load_state_dict(together.state_dict())
    losses = []
    for network, rows in ((together, 1024), (apart, 4)):
        monkeypatch.setattr("vllm_dllm.training.network.LOSS_ROWS", rows)
        losses.append(batch_loss(network, batch))
        losses[-1].backward()
    assert int((batch.targets >= 0).sum()) > 8
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for one, other in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_batch_that_masks_nothing_has_no_loss(context):
    tokens = torch.arange(5)
    draw = Draw(tokens, torch.zeros(5, dtype=torch.bool), torch.zeros(5))
    loss = batch_loss(toy_network(), lay_out([[draw, draw], [draw]], ids(context)))
    loss.backward()
    assert loss.item() == 0


def test_draws_of_a_causal_context_share_the_prefix():
    draws = [draw_refine(EXAMPLES[5], 1.01, 96, generator(seed)) for seed in range(6)]
    shared, apart = lay_out([draws], ids("causal")), lay_out([draws], ids("full"))
    assert len(shared.input_ids) == 1
    assert len(apart.input_ids) == 6
    masked = [int(draw.masked.sum()) for draw in draws]
    prefix = max(len(draw.tokens) - count for draw, count in zip(draws, masked, strict=True))
    assert shared.input_ids.shape[1] == prefix + sum(masked) + len(draws)


def test_a_causal_drafter_predicts_the_first_draft_as_the_autoregressive_model_does():
    network = toy_network()
    prefixes = [[1, 2, 3], [4, 5, 6, 0, 1]]
    for prefix in prefixes:
        row = torch.tensor([prefix])
        mask = causal_mask(len(prefix))
        logits = network(row, torch.arange(len(prefix)).unsqueeze(0), mask, torch.ones_like(row, dtype=torch.bool))
        logits[:, [MASK, SEP]] = -torch.inf
        drafts = complete(network, ids("causal"), prefix, 4, 0, generator())
        assert drafts[0] == int(logits[-1].argmax())


def test_defaults_are_the_papers(tmp_path):
    pretrain, distill, refine = (arguments(stage, tmp_path) for stage in d2a.ARGUMENTS)
    assert (pretrain.learning_rate, pretrain.num_train_epochs) == (1e-4, 40)
    assert (distill.learning_rate, distill.num_train_epochs) == (1e-4, 1)
    assert (refine.learning_rate, refine.num_train_epochs) == (5e-5, 1)
    assert (refine.alpha, refine.max_masked) == (1.01, 96)


# --- conversion --------------------------------------------------------------------------------------------------


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip


def save_autoregressive(folder, spare, vocab_size=320, tied=True):
    tokenizer = train_tokenizer(
        ["Mia has 17 apples. How many apples does Mia have now?"] * 3, vocab_size - spare, SPECIAL_TOKENS[:-1]
    )
    rows = tokenizer.get_vocab_size() + spare
    network = toy_network(vocab_size=rows, tied=tied)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    sizes = {key: getattr(network.config, key) for key in SIZES}
    tiny.save_checkpoint(config_of("qwen2", **sizes), network, tokenizer, folder)
    return network, tokenizer


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_converted_model_uses_spare_rows_and_computes_the_same(tied, tmp_path):
    network, tokenizer = save_autoregressive(tmp_path / "ar", spare=4, tied=tied)
    rows = network.config.vocab_size
    drafter = convert_checkpoint(
        tmp_path / "ar", tmp_path / "out", target=None, context="causal", sep=True, mask_token_id=None, seed=0
    )
    assert (drafter.mask, drafter.sep) == (rows - 1, rows - 2)
    assert DrafterIds.of(tmp_path / "out") == drafter
    config = read_config(tmp_path / "out")
    assert config["architectures"] == ["OpenDCoderModel"]
    assert config["vocab_size"] == rows
    assert config["tie_word_embeddings"] is tied
    assert not (tmp_path / "out" / "vocab_mapping.json").exists()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "ar" / "tokenizer.json").read_bytes()
    converted = load_network(tmp_path / "out")
    text = torch.tensor([tokenizer.encode("How many apples?").ids])
    arguments = (torch.arange(text.shape[1]).unsqueeze(0), causal_mask(text.shape[1]), torch.ones_like(text) > 0)
    before, after = network(text, *arguments), converted(text, *arguments)
    torch.testing.assert_close(after[:, : rows - 2], before[:, : rows - 2])
    new = converted.model.embed_tokens.weight[rows - 2 :]
    mean = network.model.embed_tokens.weight[: rows - 2].mean(0)
    assert (new - mean).abs().max() < 0.5 * network.model.embed_tokens.weight.std()
    assert not torch.equal(new[0], new[1])
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not tied


def test_without_spare_rows_the_embedding_grows_and_a_mapping_says_what_is_shared(tmp_path):
    network, tokenizer = save_autoregressive(tmp_path / "ar", spare=1)
    rows = network.config.vocab_size
    drafter = convert_checkpoint(
        tmp_path / "ar", tmp_path / "out", target=None, context="full", sep=True, mask_token_id=None, seed=0
    )
    assert (drafter.mask, drafter.sep) == (rows - 1, rows)
    assert read_config(tmp_path / "out")["vocab_size"] == rows + 1
    assert load_network(tmp_path / "out").model.embed_tokens.weight.shape[0] == rows + 1
    mapping = json.loads((tmp_path / "out" / "vocab_mapping.json").read_text())
    assert mapping == {str(number): number for number in sorted(tokenizer.get_vocab().values())}
    # Another drafter in the same folder has nothing of this one's.
    save_autoregressive(tmp_path / "roomy", spare=4)
    convert_checkpoint(
        tmp_path / "roomy", tmp_path / "out", target=None, context="causal", sep=False, mask_token_id=None, seed=0
    )
    assert not (tmp_path / "out" / "vocab_mapping.json").exists()
    config = read_config(tmp_path / "out")
    assert (config["context_attention"], config.get("sep_token_id")) == ("causal", None)


def test_a_known_mask_keeps_its_row_and_sep_can_be_left_out(tmp_path):
    network, _ = save_autoregressive(tmp_path / "ar", spare=3)
    rows = network.config.vocab_size
    options = {"target": None, "context": "full", "mask_token_id": rows - 3, "seed": 0}
    drafter = convert_checkpoint(tmp_path / "ar", tmp_path / "with", sep=True, **options)
    assert (drafter.mask, drafter.sep) == (rows - 3, rows - 1)
    drafter = convert_checkpoint(tmp_path / "ar", tmp_path / "without", sep=False, **options)
    assert (drafter.mask, drafter.sep) == (rows - 3, None)
    assert "sep_token_id" not in read_config(tmp_path / "without")
    weight = load_network(tmp_path / "without").model.embed_tokens.weight
    assert torch.equal(weight, network.model.embed_tokens.weight)


def test_the_drafter_gets_the_targets_tokenizer_if_it_agrees(tmp_path):
    _, tokenizer = save_autoregressive(tmp_path / "ar", spare=4)
    target = tmp_path / "target"
    save_autoregressive(target, spare=4)
    extended = json.loads((target / "tokenizer.json").read_text())
    number = tokenizer.get_vocab_size()
    extended["added_tokens"].append({**extended["added_tokens"][0], "id": number, "content": "<think>"})
    (target / "tokenizer.json").write_text(json.dumps(extended))
    drafter = convert_checkpoint(
        tmp_path / "ar", tmp_path / "out", target=target, context="causal", sep=True, mask_token_id=None, seed=0
    )
    assert load_tokenizer(tmp_path / "out").convert_tokens_to_ids("<think>") == number
    assert number not in (drafter.mask, drafter.sep)
    other = train_tokenizer(["entirely different words"] * 3, 300, SPECIAL_TOKENS[:-1])
    other.save(str(target / "tokenizer.json"))
    result = invoke("convert", "--model", tmp_path / "ar", "--out", tmp_path / "no", "--target", target)
    assert result.exit_code == 2
    assert "have other ids in the target's tokenizer" in " ".join(result.output.split())


# --- regeneration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sep", [SEP, None], ids=["sep", "no-sep"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_round_completes_the_masked_end_from_one_forward_and_the_next_round_begins_with_it(context, sep):
    network, prompt, answer = toy_network(), [1, 2, 3], [4, 5, 6, 0, 1]
    rounds = regenerate(network, ids(context, sep), prompt, answer, [4, 2, 5])
    before = answer
    for count, after in zip((4, 2, 5), rounds, strict=True):
        prefix = prompt + before[: len(before) - count]
        text = [*prefix, *[MASK] * count, *([] if sep is None else [sep])]
        mask = torch.ones(1, len(text), len(text), dtype=torch.bool)
        if context == "causal":
            mask[0, : len(prefix)] = causal_mask(len(text))[0, : len(prefix)]
        row = torch.tensor([text])
        logits = network(row, torch.arange(len(text)).unsqueeze(0), mask, torch.ones_like(row, dtype=torch.bool))
        logits[:, [MASK] if sep is None else [MASK, sep]] = -torch.inf
        expected = logits[len(prefix) - 1 : len(prefix) - 1 + count].argmax(-1).tolist()
        assert after == before[: len(before) - count] + expected
        before = after


def test_drawn_blocks_follow_the_drafters_distribution():
    network = toy_network()
    counts = torch.zeros(10)
    draws = generator()
    for _ in range(600):
        counts[complete(network, ids(), [1, 2, 3], 1, 1.0, draws)[0]] += 1
    text = torch.tensor([[1, 2, 3]])
    logits = network(text, torch.arange(3).unsqueeze(0), causal_mask(3), torch.ones_like(text) > 0)[-1]
    logits[[MASK, SEP]] = -torch.inf
    expected = logits.softmax(-1).detach() * 600
    assert ((counts - expected).square() / expected.clamp(min=1e-9))[:8].sum() < 24.3  # 0.1 % of 7 degrees
    assert not counts[[MASK, SEP]].any()


def test_regenerate_prints_the_answer_of_each_round(drafter):
    result = invoke(
        "regenerate", "--drafter", drafter, "--prompt", "How many?", "--answer", "Mia has 17 apples.", "--masked", 3,
        "--masked", 2, "--temperature", 0.6,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output.count("Mia has") == 2


ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}


# --- the commands ------------------------------------------------------------------------------------------------


def complaint(capsys, *words):
    """What a stage says of arguments that it refuses."""
    result = invoke(*words)
    assert result.exit_code == 2
    return result.output + capsys.readouterr().err


def invoke(*arguments):
    return CliRunner().invoke(d2a.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_autoregressive(folder, spare=4)
    return folder


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "drafter"
    result = invoke("convert", "--model", target, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


SHORT = (
    "--use-cpu", "--max-steps", 2, "--per-device-train-batch-size", 2, "--draws", 2, "--warmup-steps", 0,
    "--learning-rate", 1e-2, "--logging-steps", 1,
)  # fmt: skip


@pytest.mark.parametrize("stage", ["distill", "refine"])
def test_a_stage_writes_a_checkpoint_that_loads_back_with_equal_logits(stage, drafter, tmp_path):
    result = invoke(stage, "--model", drafter, "--output-dir", tmp_path / "out", *SHORT)
    assert result.exit_code == 0, result.output
    before, after = (load_file(folder / "model.safetensors") for folder in (drafter, tmp_path / "out"))
    assert {k: (t.shape, t.dtype) for k, t in after.items()} == {k: (t.shape, t.dtype) for k, t in before.items()}
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (tmp_path / "out" / "config.json").read_text() == (drafter / "config.json").read_text()
    trained = build_network(load_network(drafter).config)
    trained.load_state_dict(load_file(tmp_path / "out" / "checkpoint-2" / "model.safetensors"), strict=False)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())
    again = load_network(tmp_path / "out")
    prefixes = torch.randint(300, (2, 12), generator=generator())
    rest = (torch.arange(12).unsqueeze(0), causal_mask(12), torch.ones_like(prefixes) > 0)
    with torch.inference_mode():
        assert torch.equal(again(prefixes, *rest), trained(prefixes, *rest))
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("stage", d2a.ARGUMENTS)
def test_a_few_steps_lower_the_loss(stage, drafter, tmp_path):
    options = ("--max-steps", 24, "--problems", 4, "--save-strategy", "no")
    result = invoke(stage, "--model", drafter, "--output-dir", tmp_path / "out", *SHORT, *options)
    assert result.exit_code == 0, result.output
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])


def test_a_checkpoint_in_several_files_is_converted(target, tmp_path):
    source = tmp_path / "sharded"
    source.mkdir()
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            (source / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, source / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, source / "model-00002-of-00002.safetensors")
    result = invoke("convert", "--model", source, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(("alpha", "reason"), [(0.99, "must be at least 1"), (1.05, "diverge"), (1.2, "diverge")])
def test_unstable_alphas_are_refused_with_the_reason(alpha, reason, drafter, tmp_path, capsys):
    refused = ("refine", "--model", drafter, "--output-dir", tmp_path / "out", "--alpha", alpha, *SHORT)
    assert reason in complaint(capsys, *refused)
    assert not (tmp_path / "out").exists()


def test_a_diverging_alpha_runs_where_it_is_asked_for(drafter, tmp_path, caplog):
    words = ("--alpha", 1.2, "--allow-diverging-alpha", "--problems", 4)
    result = invoke("refine", "--model", drafter, "--output-dir", tmp_path / "out", *words, *SHORT)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "noisy" in caplog.text


@pytest.mark.parametrize(("alpha", "warned"), [(1.0, False), (1.01, False), (1.019, False), (1.02, True), (1.04, True)])
def test_noisy_alphas_are_warned_of(alpha, warned, caplog):
    d2a.check_alpha(alpha)
    assert ("noisy" in caplog.text) is warned


def write_data(path, *records):
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_token_ids_of_answers_are_taken_as_they_are_and_texts_are_tokenized(drafter, tmp_path):
    tokenizer = load_tokenizer(drafter)
    data = write_data(
        tmp_path / "answers.jsonl",
        {"prompt": "a", "response": "b", "prompt_token_ids": [5, 6], "response_token_ids": [7, 8, 9]},
        {"prompt": "How many?", "response": "3"},
    )
    kept, encoded = read_answers([data], tokenizer, tokenizer.eos_token, 512, 320)
    assert (kept.tokens.tolist(), kept.prompt_length) == ([5, 6, 7, 8, 9], 2)
    assert tokenizer.decode(encoded.tokens[: encoded.prompt_length]).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(encoded.tokens[encoded.prompt_length :]) == "3<|im_end|>"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "has no examples"),
        (["{"], "line 1 is not JSON"),
        (["[1]"], "line 1 must be an object, not list"),
        ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], 'line 2 must be an object with strings "prompt" and'),
        ([{"prompt_token_ids": [1], "response_token_ids": []}], '"response_token_ids" must be a list of token ids'),
        ([{"prompt_token_ids": "1", "response_token_ids": [1]}], '"prompt_token_ids" must be a list of token ids'),
        ([{"prompt_token_ids": [1], "response_token_ids": [9999]}], "has ids outside of the drafter's"),
    ],
)
def test_bad_data_is_refused_with_the_place(records, message, drafter, tmp_path, capsys):
    data = write_data(tmp_path / "data.jsonl", *records)
    refused = ("distill", "--model", drafter, "--output-dir", tmp_path / "out", "--data", data, "--use-cpu")
    assert message in complaint(capsys, *refused)


def test_what_cannot_be_trained_is_refused(target, drafter, tmp_path, capsys):
    out = ("--output-dir", tmp_path / "x", "--use-cpu")
    for words, message in (
        (("distill", "--model", target, *out), "is no drafter (model_type='qwen2')"),
        (("distill", "--model", drafter, "--output-dir", drafter, "--use-cpu"), "would be overwritten"),
        (("distill", "--model", tmp_path, *out), "it has no config.json"),
        (("distill", "--model", drafter, *out, "--draws", 0), "--draws=0 must be at least 1"),
        (("refine", "--model", drafter, *out, "--resume-from-checkpoint", "last"), "nothing to resume"),
        (("convert", "--model", target, "--out", target), "would be overwritten"),
        (("convert", "--model", target, "--out", tmp_path / "x", "--context", "half"), "'half' is not one of"),
        (("convert", "--model", target, "--out", tmp_path / "x", "--mask-token-id", 9999), "is not one of the"),
        (
            ("regenerate", "--drafter", drafter, "--prompt", "How many?", "--answer", "17", "--masked", 9),
            "--masked=9 is more than the answer's 2 tokens",
        ),
        (("generate", "--model", target, "--out", tmp_path / "x"), "give either --prompts or --problems"),
        (
            ("generate", "--model", target, "--out", tmp_path / "x", "--problems", 1, "--engine", "{"),
            "--engine is not JSON",
        ),
    ):
        assert message in " ".join(complaint(capsys, *words).split())


@pytest.mark.slow
def test_generated_answers_are_the_targets_own_and_a_second_run_goes_on(tmp_path):
    model = CHECKPOINTS / "tiny-qwen2"
    out = tmp_path / "answers.jsonl"
    for problems in (2, 5):
        if out.exists():  # the first run was cut off while it wrote
            out.write_text(out.read_text() + '{"prompt": "half a li')
        result = invoke(
            "generate", "--model", model, "--problems", problems, "--out", out, "--engine", json.dumps(ENGINE)
        )
        assert result.exit_code == 0, result.output
        assert len(out.read_text().splitlines()) == problems
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["prompt"] for record in records] == [p.question for p in make_problems(5, 0, "train")]
    plain = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
    for record in records:
        prompt = torch.tensor([record["prompt_token_ids"]])
        answer = plain.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=160, do_sample=False)
        assert record["response_token_ids"] == answer[0, prompt.shape[1] :].tolist()


@pytest.mark.slow
def test_the_committed_drafter_is_accepted_and_the_more_so_the_longer_its_drafts():
    target, drafter = str(CHECKPOINTS / "tiny-qwen2"), str(CHECKPOINTS / "tiny-deer")
    questions = [problem.question for problem in make_problems(30, HELD_OUT_SEED, "test")]
    options = {"max_tokens": 128, "temperature": 0, **ENGINE}
    with started_quickly():
        outcomes = [speculate(target, drafter, k, questions, **options) for k in (4, 16)]
    # What the same process starts next may want another model runner.
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert outcomes[0].accepted < outcomes[1].accepted
    assert outcomes[1].accepted >= 4
    assert outcomes[1].target_forwards_per_token <= 0.25


def test_only_answers_that_end_are_padded(tmp_path):
    examples = [Example(torch.tensor([1, 2, 3, 4, end]), 2) for end in (5, 6)]
    run = visits("refine", tmp_path, "--padding", 4, examples=examples, end_token_ids={5})
    longest = {5: 0, 6: 0}
    for visit in range(200):
        end = int(examples[run.example(visit)].tokens[-1])
        longest[end] = max(longest[end], *(len(draw.tokens) for draw in run[visit]))
    assert longest == {5: 9, 6: 5}


def test_a_run_goes_on_behind_whole_answers(target, tmp_path):
    """Whatever characters they have, and wherever a run was cut off."""
    out = tmp_path / "answers.jsonl"
    prompts = [problem.question for problem in make_problems(2, 0, "train")]
    lines = [
        json.dumps({"prompt": prompt, "response": "one\u2028two\x85 three"}, ensure_ascii=False) for prompt in prompts
    ]
    whole = "".join(f"{line}\n" for line in lines).encode()
    for written in (whole, whole[:-1], whole + b"\n", whole + '{"prompt": "caf\u00e9'.encode()[:-1]):
        out.write_bytes(written)
        result = invoke("generate", "--model", target, "--problems", 2, "--out", out)
        assert result.exit_code == 0, result.output
        assert "has all 2 answers already" in " ".join(result.output.split())
        assert [line for line in out.read_bytes().split(b"\n") if line] == whole.split(b"\n")[:2]
    assert [record["response"] for _, record in read_records(out)] == ["one\u2028two\x85 three"] * 2
    out.write_bytes(b'{"prompt": "half\n' + whole)
    result = invoke("generate", "--model", target, "--problems", 2, "--out", out)
    assert (result.exit_code, "line 1 is not JSON" in " ".join(result.output.split())) == (2, True)


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_named_before_any_is_answered(tmp_path):
    prompts = write_data(tmp_path / "prompts.jsonl", {"prompt": "How many?"}, {"prompt": "How many? " * 200})
    engine = json.dumps({**ENGINE, "max_model_len": 64})
    with started_quickly():
        result = invoke(
            "generate", "--model", CHECKPOINTS / "tiny-qwen2", "--prompts", prompts, "--out", tmp_path / "out.jsonl",
            "--engine", engine,
        )  # fmt: skip
    assert result.exit_code == 2
    assert "prompt 2 has" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "qwen3"}, "draft_model"),
        ({"model_type": "qwen2"}, "draft_model"),
        ({"model_type": "qwen2", "mask_token_id": 9}, "dllm"),
        ({"model_type": "open_dcoder", "mask_token_id": 9}, "dllm"),
        ({"model_type": "sdar"}, "dllm"),
    ],
)
def test_how_a_model_drafts_is_what_its_config_says(config, method, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert method_of(str(tmp_path)) == method


def test_answers_to_other_prompts_are_not_continued(target, tmp_path):
    out = write_data(tmp_path / "answers.jsonl", {"prompt": "something else"})
    result = invoke("generate", "--model", target, "--problems", 1, "--out", out)
    assert result.exit_code == 2
    assert "has answers to other prompts" in " ".join(result.output.split())


@pytest.mark.slow
def test_evaluate_prints_a_row_for_each_drafter_and_length():
    target = CHECKPOINTS / "tiny-qwen2"
    with started_quickly():
        result = invoke(
            "evaluate", "--target", target, "--drafter", CHECKPOINTS / "tiny-deer", "--drafter", target, "--k", 2,
            "--problems", 2, "--max-tokens", 7, "--engine", json.dumps(ENGINE),
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tiny-deer" in result.output
    assert "0.429" in result.output  # of the target itself: a prefill and two rounds for 7 tokens
