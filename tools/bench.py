"""Measure speed and scores, and print the tables of the README. `make bench` runs it.

Each run is a process of its own on one thread, one after another, so that the seconds are those of one core. With
Stable-Baselines3 installed (pip install ".[bench]") its PPO runs beside ours, and ratios are printed: ratios compare
across machines, seconds do not.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import torch
from bench_math import gae_ratio, ppo_loss_microseconds

OURS = (("CartPole-v1", range(5)), ("LunarLander-v3", range(3)))
# The tuned settings that rl-zoo publishes for Stable-Baselines3's PPO, and its number of steps.
SB3 = {
    "CartPole-v1": {
        "total_steps": 100_000,
        "num_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "n_epochs": 20,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "ent_coef": 0.0,
        "learning_rate": lambda left: 0.001 * left,
        "clip_range": lambda left: 0.2 * left,
    },
    "LunarLander-v3": {
        "total_steps": 100_000,
        "num_envs": 16,
        "n_steps": 1024,
        "batch_size": 64,
        "n_epochs": 4,
        "gae_lambda": 0.98,
        "gamma": 0.999,
        "ent_coef": 0.01,
    },
}


def load_torch() -> None:
    """Make torch load what it puts off until the first optimizer is made: a second that is no training."""
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])


def run_ours(env_id: str, seed: int) -> dict[str, float]:
    """Train with the tuned settings; seconds are of training alone, after the imports."""
    from ppo_lab.control.config import tuned
    from ppo_lab.control.evaluate import evaluate
    from ppo_lab.control.train import train_agent

    load_torch()
    wall, cpu = time.perf_counter(), time.process_time()
    learner, rows = train_agent(tuned(env_id, "ppo", seed=seed))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    returns = evaluate(learner.network, env_id, 100, seed=10_000)
    return {"steps": rows[-1]["steps"], "wall": wall, "cpu": cpu, "mean": returns.mean(), "std": returns.std()}


def run_sb3(env_id: str, seed: int) -> dict[str, float]:
    """Train Stable-Baselines3's PPO with its published settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    load_torch()
    settings = dict(SB3[env_id])
    steps, num_envs = settings.pop("total_steps"), settings.pop("num_envs")
    wall, cpu = time.perf_counter(), time.process_time()
    model = PPO("MlpPolicy", make_vec_env(env_id, num_envs, seed=seed), seed=seed, device="cpu", **settings)
    model.learn(steps)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    returns, _ = evaluate_policy(
        model, make_vec_env(env_id, 25, seed=10_000), 100, deterministic=True, return_episode_rewards=True
    )
    returns = torch.tensor(returns)
    return {
        "steps": model.num_timesteps,
        "wall": wall,
        "cpu": cpu,
        "mean": float(returns.mean()),
        "std": float(returns.std(unbiased=False)),
    }


def child(kind: str, env_id: str, seed: int) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", kind, env_id, str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if done.returncode:
        sys.exit(f"bench: {kind} {env_id} seed {seed} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def print_row(kind: str, env_id: str, seed: int) -> dict[str, float]:
    row = child(kind, env_id, seed)
    speed = row["steps"] / row["wall"]
    seconds = f"{row['wall']:.1f} | {row['cpu']:.1f}"
    score = f"{row['mean']:.1f} ± {row['std']:.1f}"
    print(f"| {kind} | {env_id} | {seed} | {row['steps']:,} | {seconds} | {speed:,.0f} | {score} |", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", nargs=3, metavar=("KIND", "ENV", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, env_id, seed = args.child
        print(json.dumps({"ppo_lab": run_ours, "sb3": run_sb3}[kind](env_id, int(seed)), default=float))
        return
    print(f"{date.today()}, {os.cpu_count()} cores {platform.machine()}, torch {torch.__version__}, one thread\n")
    print("| | environment | seed | steps | seconds | CPU seconds | steps/s | greedy return, 100 episodes |")
    print("|---|---|---|---|---|---|---|---|")
    measured = {env_id: [print_row("ppo_lab", env_id, seed) for seed in seeds] for env_id, seeds in OURS}
    if find_spec("stable_baselines3") is None:
        print('\nStable-Baselines3 is not installed (pip install ".[bench]"): no ratios.')
    else:
        theirs = {env_id: print_row("sb3", env_id, 0) for env_id in SB3}
        print_ratios(measured, theirs)
    print()
    torch.set_num_threads(1)
    gae_ratio()
    ppo_loss_microseconds()
    print(flush=True)
    subprocess.run([sys.executable, str(Path(__file__).with_name("bench_llm.py"))], check=True)


def print_ratios(measured: dict[str, list[dict[str, float]]], theirs: dict[str, dict[str, float]]) -> None:
    """Whole training time on CartPole, and steps per second on both, ours against Stable-Baselines3's."""
    mean_wall = sum(row["wall"] for row in measured["CartPole-v1"]) / len(measured["CartPole-v1"])
    print(f"\nCartPole-v1, time of a whole training: {theirs['CartPole-v1']['wall'] / mean_wall:.1f}× faster")
    for env_id, rows in measured.items():
        speed = sum(row["steps"] for row in rows) / sum(row["wall"] for row in rows)
        print(f"{env_id}, steps per second: {speed / (theirs[env_id]['steps'] / theirs[env_id]['wall']):.1f}× faster")


if __name__ == "__main__":
    main()
