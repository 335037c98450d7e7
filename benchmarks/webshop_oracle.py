"""Benchmark how often the oracle shopper succeeds.

    python benchmarks/webshop_oracle.py [--data_dir DIR] [--goals 1000]

Shows whether the goals are reachable. Plays goals spread evenly over all splits
of a generated shop or of the official files. Prints a table row with success,
mean score, turns and speed of the environment, prompts included.
"""

import argparse
import time

from envs import base
from envs.webshop import env as webshop_env


def measure(data_dir: str | None, num_goals: int) -> str:
  """Returns a table row."""
  env = webshop_env.Env(data_dir=data_dir, max_steps=30)
  tasks = [
    base.Task(split, index)
    for split in webshop_env.SPLITS
    for index in range(len(webshop_env.tasks(split, data_dir=data_dir)))
  ]
  count = min(num_goals, len(tasks))
  chosen = [tasks[n * len(tasks) // count] for n in range(count)]
  successes, score, steps, seconds = 0, 0.0, 0, 0.0
  for task in chosen:
    responses = [r for _, r in env.demonstrate(task, noise=0.0, seed=0)]
    start = time.perf_counter()
    env.reset(task)
    results = [env.step(response) for response in responses]
    seconds += time.perf_counter() - start
    successes += results[-1].success
    score += results[-1].score or 0.0
    steps += len(results)
  cells = (
    'official' if data_dir else 'generated',
    f'{len(chosen):,} of {len(tasks):,}',
    f'{successes / len(chosen):.2%}',
    f'{score / len(chosen):.4f}',
    f'{steps / len(chosen):.2f}',
    f'{steps / seconds:,.0f}',
  )
  return f'| {" | ".join(cells)} |'


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--data_dir', help='official files; default: generated')
  parser.add_argument('--goals', type=int, default=1000)
  options = parser.parse_args()
  print('| shop | goals | success | score | turns | steps/s |')
  print('|---|---|---|---|---|---|')
  print(measure(options.data_dir, options.goals))


if __name__ == '__main__':
  main()
