"""Teach a served model by reinforcement: rollouts with step maps, TraceRL's loss, new weights without a restart.

python examples/rl.py train --out rl-tiny

The model is the tiny one, the task is its arithmetic at a block per denoising step, and a run takes minutes on two CPU
cores. `docs/rl.md` explains each part.
"""

import json
import math
import os
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer

# Engine and trainer take turns on the same cores: an engine process of its own would spin where it waits.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# The engine would pin the trainer's threads, too.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput

from vllm_dllm import request_stats
from vllm_dllm.commands.problems import grade
from vllm_dllm.tiny.arithmetic import HELD_OUT_SEED, Problem, make_problems
from vllm_dllm.tiny.text import END_OF_TEXT, IM_END, render_prompt
from vllm_dllm.training.layouts import load_network, read_config, released_tensors
from vllm_dllm.training.objectives import IGNORE
from vllm_dllm.training.trace_rl import (
    Trajectory,
    group_advantages,
    rollout_log_probs,
    token_log_probs,
    trace_rl_loss,
    training_states,
)

FAMILY = "sdar"
MAX_TOKENS = 48
"""Of an answer. The tiny model's are shorter."""
_CURVE = "curve.json"
_WARMUP = 5
"""Iterations of the learning rate's warm-up."""
_MICRO_BATCH = 16
"""Answers per forward of the trainer."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a run.

    Attributes:
        updates: optimizer steps per rollout.
        learning_rate: of AdamW, after a linear warm-up.
        clip, kl: see ``trace_rl_loss``.
    """

    updates: int
    learning_rate: float
    clip: float
    kl: float


class Policy:
    """The engine that answers and the network that learns, with one set of weights.

    Masters are float32, and so is the engine: bfloat16 would round a small update away.
    """

    def __init__(self, model: Path, out: Path, max_num_seqs: int, tokens_per_step: int):
        try:
            config = read_config(model)
        except FileNotFoundError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from None
        if config["model_type"] != FAMILY:
            raise typer.BadParameter(f"{model} is no model of the family {FAMILY}", param_hint="--model")
        shutil.copytree(model, out, ignore=shutil.ignore_patterns("README.md"), dirs_exist_ok=True)
        (out / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}, indent=2) + "\n")
        self.folder = out
        self.decoding = {"dllm_policy": "static", "dllm_tokens_per_step": tokens_per_step}
        self.block_length: int = config["block_size"]
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        self.end_of_text = self.tokenizer.token_to_id(END_OF_TEXT)
        self.stops = {self.end_of_text, self.tokenizer.token_to_id(IM_END)}
        self.mask: int = config["mask_token_id"]
        self.network = load_network(model)
        self.save()
        self.llm = LLM(
            str(out),
            dtype="float32",
            logprobs_mode="processed_logprobs",
            max_model_len=256,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=1 << 28,
            enforce_eager=True,
        )

    def save(self) -> None:
        tensors = released_tensors(self.network.state_dict(), read_config(self.folder))
        save_file(tensors, self.folder / "model.safetensors", metadata={"format": "pt"})

    def push(self) -> None:
        """Let the engine answer with the network's weights."""
        self.save()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})

    def prompt(self, problem: Problem) -> dict[str, Any]:
        return {"prompt_token_ids": self.tokenizer.encode(render_prompt(problem.question)).ids}


@dataclass(frozen=True)
class Rollout:
    """Answers to a batch of problems.

    Attributes:
        trajectories, advantages: of the answers to learn from. All answers to a problem may be right, or all wrong:
            those have no advantage and are left out.
        accuracy: of all answers.
        forwards: per answer, on average.
    """

    trajectories: list[Trajectory]
    advantages: torch.Tensor
    accuracy: float
    forwards: float


def roll_out(policy: Policy, problems: list[Problem], answers: int, seed: int) -> Rollout:
    """Let the engine answer each problem several times at temperature 1.

    Answers go on behind the stop token up to the end of a block. A state of the block that has the stop token shows
    tokens behind the stop token, too, so the trainer needs them.
    """
    prompts = [policy.prompt(problem) for problem in problems]
    params = []
    for number, prompt in enumerate(prompts):
        end = (len(prompt["prompt_token_ids"]) + MAX_TOKENS) // policy.block_length * policy.block_length
        params.append(
            SamplingParams(
                n=answers,
                temperature=1.0,
                max_tokens=end - len(prompt["prompt_token_ids"]),
                ignore_eos=True,
                logprobs=0,
                seed=(seed * len(prompts) + number) * answers,
                extra_args={**policy.decoding, "dllm_step_map": True},
            )
        )
    outputs = policy.llm.generate(prompts, params, use_tqdm=False)
    rewards = torch.tensor(
        [
            [grade(answer_text(policy, each), problem.final_answer) for each in output.outputs]
            for output, problem in zip(outputs, problems, strict=True)
        ],
        dtype=torch.float32,
    )
    advantages = group_advantages(rewards).flatten()
    stats = [request_stats(each) for output in outputs for each in output.outputs]
    trajectories = [
        trajectory(policy, prompt["prompt_token_ids"], each)
        for prompt, output in zip(prompts, outputs, strict=True)
        for each in output.outputs
    ]
    kept = advantages.nonzero().flatten().tolist()
    return Rollout(
        [trajectories[index] for index in kept],
        advantages[kept],
        rewards.mean().item(),
        sum(each.nfe for each in stats) / len(stats),
    )


def answer_length(policy: Policy, tokens: list[int]) -> int:
    """Tokens of an answer, the stop token included."""
    stops = policy.stops
    return next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))


def answer_text(policy: Policy, completion: CompletionOutput) -> str:
    tokens = list(completion.token_ids)
    return policy.tokenizer.decode(tokens[: answer_length(policy, tokens)])


def trajectory(policy: Policy, prompt: list[int], completion: CompletionOutput) -> Trajectory:
    """What the trainer needs of an answer: its tokens, their denoising steps and their log-probabilities."""
    step_map = request_stats(completion).step_map
    assert step_map is not None, "the request asked for a step map"
    assert completion.logprobs is not None, "the request asked for log-probabilities"
    tokens = list(completion.token_ids)
    return Trajectory(
        prompt=prompt,
        tokens=tokens,
        steps=step_map.steps,
        log_probs=[each[token].logprob for token, each in zip(tokens, completion.logprobs, strict=True)],
        learned=answer_length(policy, tokens),
    )


def learn(policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout, settings: Settings) -> float:
    """Take the updates of one rollout, each on a share of its answers.

    Returns:
        The largest difference between the engine's log-probabilities and the trainer's before the first update: that of
        two ways to compute the same numbers. 0 where there was nothing to learn from.
    """
    mismatch = 0.0
    if not rollout.trajectories:
        return mismatch
    sizes = torch.tensor([each.num_states(policy.block_length) for each in rollout.trajectories])
    for number, share in enumerate(torch.randperm(len(sizes)).chunk(settings.updates)):
        # Answers of about as many states share a forward, so that little of the forward is padding.
        for chosen in share[sizes[share].argsort()].split(_MICRO_BATCH):
            trajectories = [rollout.trajectories[index] for index in chosen]
            batch = training_states(
                trajectories,
                block_length=policy.block_length,
                mask_token_id=policy.mask,
                pad_token_id=policy.end_of_text,
            )
            rows = batch.targets != IGNORE
            new = token_log_probs(policy.network, batch, mask_token_id=policy.mask)
            old = rollout_log_probs(trajectories, batch)
            advantages = rollout.advantages[chosen][rows.nonzero()[:, 0]]
            # The mean over the states of the answers, and over the parts of the share.
            weights = batch.weights[rows] / batch.weights.sum() * len(chosen) / len(share)
            trace_rl_loss(new, old, advantages, weights, clip=settings.clip, kl=settings.kl).backward()
            if number == 0:
                mismatch = max(mismatch, (new.detach() - old).abs().max().item())
        torch.nn.utils.clip_grad_norm_(policy.network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return mismatch


def evaluate(policy: Policy, problems: list[Problem]) -> float:
    """Share of right answers, greedy."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, extra_args=policy.decoding)
    outputs = policy.llm.generate([policy.prompt(problem) for problem in problems], params, use_tqdm=False)
    right = sum(
        grade(output.outputs[0].text, problem.final_answer) for output, problem in zip(outputs, problems, strict=True)
    )
    return right / len(problems)


def interval(share: float, count: int) -> float:
    """Half of the 95 % interval of a share."""
    return 1.96 * (share * (1 - share) / count) ** 0.5


app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the taught checkpoint, its curve and a picture.")],
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkpoint to start from.")] = Path(
        "checkpoints/tiny-sdar"
    ),
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens that a denoising step unmasks.")] = 16,
    iterations: Annotated[int, typer.Option(min=1, help="Rollouts, each with updates and a push of weights.")] = 30,
    prompts: Annotated[int, typer.Option(min=1, help="Problems per rollout.")] = 32,
    answers: Annotated[int, typer.Option(min=2, help="Answers per problem.")] = 8,
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps per rollout.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-4,
    clip: Annotated[float, typer.Option(help="Ratios beyond 1 - CLIP and 1 + CLIP give no more.")] = 0.2,
    kl: Annotated[float, typer.Option(help="Factor of the KL penalty.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed of the problems, the answers and the order of updates.")] = 1,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out problems to evaluate on.")] = 400,
    every: Annotated[int, typer.Option(min=1, help="Iterations between two evaluations.")] = 10,
) -> None:
    """Teach the model, and write the taught checkpoint, its curve and a picture."""
    if out.resolve() == model.resolve():
        raise typer.BadParameter("is the folder of --model, whose weights would be overwritten", param_hint="--out")
    settings = Settings(updates, learning_rate, clip, kl)
    torch.manual_seed(seed)
    policy = Policy(model, out, prompts * answers, tokens_per_step)
    optimizer = torch.optim.AdamW(policy.network.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _WARMUP, total_iters=_WARMUP)
    problems = make_problems(iterations * prompts, seed, "train")
    test = make_problems(held_out, HELD_OUT_SEED, "test")
    run: dict[str, Any] = {
        "model": str(model),
        "tokens_per_step": tokens_per_step,
        "seed": seed,
        "prompts": prompts,
        "answers": answers,
        **asdict(settings),
        "held_out_problems": held_out,
        "curve": [],
    }
    run["start"] = evaluate(policy, test)
    began, began_processor = time.monotonic(), time.process_time()
    console = Console()
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("reward {task.fields[reward]:.3f}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("learning", total=iterations, reward=math.nan)
        for iteration in range(iterations):
            rollout = roll_out(
                policy, problems[iteration * prompts :][:prompts], answers, seed=seed * 100_000 + iteration
            )
            mismatch = learn(policy, optimizer, rollout, settings)
            warmup.step()
            policy.push()
            point = {"reward": rollout.accuracy, "forwards": rollout.forwards, "mismatch": mismatch}
            if (iteration + 1) % every == 0 or iteration + 1 == iterations:
                point["held_out"] = evaluate(policy, test)
                console.print(f"iteration {iteration + 1}: held out {point['held_out']:.1%}")
            run["curve"].append({**point, "minutes": (time.monotonic() - began) / 60})
            run["minutes"], run["processor_minutes"] = (
                (now - then) / 60 for now, then in ((time.monotonic(), began), (time.process_time(), began_processor))
            )
            (out / _CURVE).write_text(json.dumps(run, indent=1) + "\n")
            progress.update(bar, advance=1, reward=rollout.accuracy)
    end = run["curve"][-1]["held_out"]
    console.print(
        f"{out}: held out {run['start']:.1%} before, {end:.1%} after (each ± {interval(end, held_out):.1%}), "
        f"{run['minutes']:.1f} minutes"
    )
    draw_curves([run], out / "curve.png")


@app.command()
def draw(
    folders: Annotated[list[Path], typer.Argument(help="Folders that the command train wrote.")],
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")],
) -> None:
    """Draw the curves of several runs into one picture."""
    for folder in folders:
        if not (folder / _CURVE).is_file():
            raise typer.BadParameter(f"{folder} has no {_CURVE}", param_hint="FOLDERS")
    draw_curves([json.loads((folder / _CURVE).read_text()) for folder in folders], picture)


def draw_curves(runs: list[dict[str, Any]], picture: Path) -> None:
    """Rewards of the rollouts, and accuracy on held-out problems, by iteration."""
    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, run in enumerate(runs):
        color = f"C{number}"
        rewards = [point["reward"] for point in run["curve"]]
        smooth = [statistics.fmean(rewards[max(0, end - 5) : end]) for end in range(1, len(rewards) + 1)]
        axes.plot(range(1, len(rewards) + 1), smooth, color=color, alpha=0.5)
        evaluated = {0: run["start"]}
        evaluated |= {n: point["held_out"] for n, point in enumerate(run["curve"], 1) if "held_out" in point}
        axes.plot(evaluated.keys(), evaluated.values(), "o-", color=color, label=f"seed {run['seed']}")
    axes.set(
        xlabel="iteration",
        ylabel="share of right answers",
        title="Dots: held out, greedy. Lines: reward at temperature 1, mean of 5 iterations",
    )
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    app()
