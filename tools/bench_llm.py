"""Measure the language-model part: overhead of an iteration, work saved on short answers, memory, agreement, quality.

`tools/bench.py` calls it. Each measurement can be run alone: python tools/bench_llm.py overhead
"""

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from ppo_lab.files import locate
from ppo_lab.llm.config import PPOSettings, RunSettings, load_preset, make_settings
from ppo_lab.llm.experience import by_length, collect, select
from ppo_lab.llm.generate import accepted_arguments
from ppo_lab.llm.models import Actor, load_tokenizer
from ppo_lab.llm.ppo import judged_columns, kl_per_response, llm_ppo_iteration, make_controller, prompt_batch, train
from ppo_lab.llm.prompts import encode_prompts, read_prompts
from ppo_lab.llm.reviews import judge
from ppo_lab.llm.rewards import RewardModel
from ppo_lab.llm.roles import Roles, assemble, make_roles
from ppo_lab.llm.tokens import token_logp, token_statistics

TINY = {"vocabulary": 150, "hidden": 64, "layers": 2, "heads": 4, "prompts": 128, "prompt": 5, "answer": 24}
LARGER = {"vocabulary": 8000, "hidden": 256, "layers": 4, "heads": 4, "prompts": 64, "prompt": 32, "answer": 64}
# An id that no model makes: every answer then has its full length.
NEVER = -1


def make_models(size: dict[str, int]) -> tuple[Roles, PPOSettings, list[list[int]]]:
    """Four random Llamas of a size, prompts of equal length, answers that never end, two epochs of minibatches."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        intermediate_size=2 * size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        max_position_embeddings=size["prompt"] + size["answer"],
        tie_word_embeddings=True,
        pad_token_id=0,
        num_labels=1,
    )
    tokenizer = load_tokenizer(locate("models/sft"))
    reward = RewardModel(LlamaForSequenceClassification(config), tokenizer, tokenizer)
    ppo = PPOSettings(
        batch_size=size["prompts"],
        max_new_tokens=size["answer"],
        minibatch_size=size["prompts"] // 2,
        micro_batch_size=size["prompts"] // 2,
        score_batch_size=size["prompts"],
    )
    prompts = torch.randint(10, size["vocabulary"], (size["prompts"], size["prompt"])).tolist()
    roles = assemble(LlamaForCausalLM(config), reward, tokenizer, prompts, RunSettings(ppo=ppo))
    roles.eos_token_ids = [NEVER]
    return roles, ppo, prompts


def bare_passes(roles: Roles, ppo: PPOSettings, prompts: list[list[int]]) -> None:
    """What no implementation can avoid: a cached generation, one forward of each scorer, K forwards and backwards.

    The actor's passes end in cross_entropy, the cheapest way from logits to log-probabilities and their gradient; the
    critic's in a mean. Nothing is masked, recorded, clipped or stepped.
    """
    actor, critic, reference = roles.actor.module, roles.critic.module, roles.reference
    prompt_ids, n = torch.tensor(prompts), ppo.max_new_tokens
    with torch.no_grad():
        tokens, cache, made = prompt_ids, DynamicCache(config=actor.lm.config), []
        for _ in range(n):
            output = actor.lm(input_ids=tokens, use_cache=True, logits_to_keep=1, **cache_argument(actor.lm, cache))
            tokens = output.logits[:, -1:].argmax(-1)
            made.append(tokens)
        answers = torch.cat(made, 1)
        ids = torch.cat([prompt_ids, answers], 1)
        logits = response_logits(reference.lm, ids, n)
        cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
        roles.reward.model.base_model(input_ids=ids, use_cache=False)
        critic.backbone(input_ids=ids, use_cache=False)
    for _ in range(ppo.k_epochs):
        for part in torch.arange(len(ids)).split(ppo.minibatch_size):
            logits = response_logits(actor.lm, ids[part], n)
            cross_entropy(logits.flatten(0, 1), answers[part].flatten()).backward()
            critic.head(critic.backbone(input_ids=ids[part], use_cache=False).last_hidden_state).mean().backward()
    roles.actor.discard()
    roles.critic.discard()


def cache_argument(lm: LlamaForCausalLM, cache: DynamicCache) -> dict[str, DynamicCache]:
    """The cache under the name that this version of Transformers gives it."""
    return {"cache" if "cache" in accepted_arguments(type(lm)) else "past_key_values": cache}


def response_logits(lm: LlamaForCausalLM, ids: Tensor, n: int) -> Tensor:
    """Logits of the states before the last n tokens."""
    return lm(input_ids=ids, use_cache=False, logits_to_keep=n + 1).logits[:, :-1]


def alternate(functions: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Seconds of each function in each round, by turns, so that a busy machine slows all alike; one round warms up."""
    seconds: list[list[float]] = [[] for _ in functions]
    for round_number in range(rounds + 1):
        for times, function in zip(seconds, functions, strict=True):
            started = time.perf_counter()
            function()
            if round_number:
                times.append(time.perf_counter() - started)
    return seconds


def overhead(rounds: int = 9) -> None:
    """One iteration against the bare sum of its passes, with answers of fixed length."""
    for name, size, n in (("tiny", TINY, rounds), ("hidden 256", LARGER, max(3, rounds // 3))):
        roles, ppo, prompts = make_models(size)
        controller = make_controller(ppo)
        numbers = iter(range(10**6))
        ours, bare = alternate(
            [
                lambda r=roles, p=ppo, q=prompts, c=controller, i=numbers: llm_ppo_iteration(q, r, c, p, next(i)),
                lambda r=roles, p=ppo, q=prompts: bare_passes(r, p, q),
            ],
            n,
        )
        ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
        print(
            f"iteration, {name}: {statistics.median(ours):.3f} s, bare passes {statistics.median(bare):.3f} s, "
            f"median ratio of {n} pairs {ratio:.2f}x",
            flush=True,
        )


def saving(rounds: int = 5) -> None:
    """An iteration with answers that end early against the same one computed to the full length of all.

    Both read their answers in batches of 8 (tiny: 32), neighbours in length together.
    """
    for name, size, rows in (("tiny", TINY, 32), ("hidden 256", LARGER, 8)):
        roles, ppo, prompts = make_models(size)
        ppo = replace(ppo, micro_batch_size=rows, score_batch_size=rows)
        # Two ids in `answer` end an answer, so the lengths are spread from 1 to the limit.
        ends = list(range(1, 1 + 2 * size["vocabulary"] // size["answer"]))
        lengths: list[Tensor] = []

        def iteration(eos: list[int], roles=roles, ppo=ppo, prompts=prompts, lengths=lengths) -> None:
            roles.eos_token_ids = eos
            experience, _ = llm_ppo_iteration(prompts, roles, make_controller(ppo), ppo, len(lengths))
            lengths.append(experience.mask.sum(-1).float().mean())

        short, padded = alternate([lambda e=ends, i=iteration: i(e), lambda i=iteration: i([NEVER])], rounds)
        print(
            f"answers of {float(torch.stack(lengths[::2]).mean()):.1f} of {size['answer']} tokens, {name}: "
            f"{statistics.median(short):.3f} s, all computed to the limit {statistics.median(padded):.3f} s: "
            f"{statistics.median(b / a for a, b in zip(short, padded, strict=True)):.2f}x faster",
            flush=True,
        )


def memory() -> None:
    """Peak memory of one training pass on a vocabulary of 32,000, each version in a process of its own."""
    peaks = {kind: float(child("memory", kind)) for kind in ("naive", "ours")}
    share = peaks["ours"] / peaks["naive"]
    print(f"peak memory, vocabulary 32,000: {peaks['ours']:.0f} MB, naive {peaks['naive']:.0f} MB: {share:.0%}")


def memory_child(kind: str) -> None:
    """Print the megabytes by which one forward and backward pass of 16 x (32 + 64) tokens raises the peak."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=96,
        tie_word_embeddings=True,
    )
    actor = Actor(LlamaForCausalLM(config))
    ids = torch.randint(0, 32_000, (16, 96))
    mask = torch.ones_like(ids, dtype=torch.bool)
    before = peak_megabytes()
    if kind == "ours":
        logits, _ = actor(ids, mask, 64)
        logp, entropy = token_statistics(logits, ids[:, 32:])
    else:
        log_probs = actor.lm(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        logp = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -64:]
        entropy = -(log_probs.exp() * log_probs).sum(-1)[:, -64:]
    (logp.mean() + 0.01 * entropy.mean()).backward()
    print(peak_megabytes() - before)


def peak_megabytes() -> float:
    """The most memory this process has held. Not from getrusage, where a child begins with its parent's figure."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return float(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 1024


def ranks(iterations: int = 10) -> None:
    """Two ranks under DeepSpeed, each with the batch of one process, against that process: the price of being two."""
    alone = [sys.executable, "-m", "ppo_lab.llm.run"]
    two = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ppo_lab.llm.run",
    ]
    doubled = ["--batch_size", "256", "--minibatch_size", "128"]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, command, flags in (("one process", alone, []), ("two ranks", two, doubled)):
            out = Path(folder) / name.replace(" ", "_")
            done = subprocess.run(
                [*command, "--preset", "tiny", "--iterations", str(iterations), "--out", str(out), *flags],
                capture_output=True,
                text=True,
                timeout=600,
            )
            if done.returncode:
                sys.exit(f"bench_llm: {name} failed:\n{done.stderr[-2000:]}")
            with open(out / "metrics.csv", newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))[2:]
            seconds[name] = statistics.median(
                sum(float(row[column]) for column in row if column.startswith("seconds_")) for row in rows
            )
    print(
        f"an iteration of 128 answers a rank: one process {seconds['one process']:.3f} s, two ranks "
        f"{seconds['two ranks']:.3f} s: {seconds['two ranks'] / seconds['one process']:.2f}x"
    )


def agreement() -> None:
    """Largest difference between the sampler's log-probabilities and those of forward passes of any shape."""
    roles, prompts = make_roles(make_settings(load_preset("tiny")))
    settings = PPOSettings()
    experience = collect(prompt_batch(prompts, settings, 0), roles, settings, 0)
    for bf16, sizes in ((False, (1, 7, 64, 128)), (True, (7, 128))):
        differences = []
        for size in sizes:
            for rows in by_length(experience, torch.arange(len(experience.mask)), size):
                part = select(experience, rows)
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    logits, _ = roles.actor.module(*part.ids_and_mask(), part.response_ids.shape[1])
                difference = (token_logp(logits, part.response_ids) - part.old_logp) * part.mask
                differences.append(float(difference.abs().max()))
        print(f"log-probabilities, {'bf16' if bf16 else 'float32'}, batches of {sizes}: {max(differences):.1e}")


def quality() -> None:
    """The tiny preset on three seeds: seconds, and 512 held-out answers; then the same without a KL penalty."""
    print("| seed | seconds | positive | grammatical | gold | KL per response |\n|---|---|---|---|---|---|")
    for seed in range(3):
        settings = make_settings({**load_preset("tiny"), "seed": seed})
        roles, prompts = make_roles(settings)
        started = time.perf_counter()
        for _ in train(prompts, roles, settings.ppo, judge=judge):
            pass
        seconds = time.perf_counter() - started
        rows = read_prompts(replace(settings.data, prompts="reviews/prompts_held_out.txt")) * 4
        held_out = encode_prompts(rows, roles.tokenizer, roles.actor.module.lm, settings)
        experience = collect(held_out, roles, settings.ppo, 10**6)
        row = judged_columns(experience, roles, judge)
        print(
            f"| {seed} | {seconds:.1f} | {row['positive']:.3f} | {row['grammatical']:.3f} | {row['gold']:.2f} | "
            f"{kl_per_response(experience):.2f} |",
            flush=True,
        )
    for seed in range(3):
        settings = make_settings({**load_preset("tiny"), "seed": seed, "kl_coef": 0.0, "iterations": 50})
        roles, prompts = make_roles(settings)
        rows = [row for row, _ in train(prompts, roles, settings.ppo, judge=judge)]
        gold, proxy = (smooth([row[name] for row in rows]) for name in ("gold", "scaled_score"))
        peak = gold.index(max(gold))
        print(
            f"no KL penalty, seed {seed}: gold {gold[peak]:.2f} at iteration {peak + 1}, {gold[-1]:.2f} at the end; "
            f"proxy {proxy[peak]:.2f} then, {proxy[-1]:.2f} at the end",
            flush=True,
        )


def smooth(values: list[float]) -> list[float]:
    """Means of three neighbours."""
    return [sum(values[i - 1 : i + 2]) / 3 for i in range(1, len(values) - 1)]


def child(name: str, argument: str) -> str:
    """What a measurement prints in a process of its own."""
    done = subprocess.run([sys.executable, __file__, name, argument], capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"bench_llm: {name} {argument} failed:\n{done.stderr[-2000:]}")
    return done.stdout


MEASUREMENTS = {
    "overhead": overhead,
    "saving": saving,
    "memory": memory,
    "ranks": ranks,
    "agreement": agreement,
    "quality": quality,
}


def main() -> None:
    """Run all measurements, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=MEASUREMENTS)
    parser.add_argument("kind", nargs="?", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.kind:
        memory_child(flags.kind)
        return
    for name, measure in MEASUREMENTS.items():
        if flags.name in (None, name):
            measure()


if __name__ == "__main__":
    main()
