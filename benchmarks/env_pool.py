"""Many environments over few processes: steps/s, resets, memory.

    python benchmarks/env_pool.py --envs 128 --workers 2

Plays full-size generated games of ALFWorld on both engines and the generated
shop, groups of 8 on the same task as in training, with uniformly drawn
admissible actions; prints a row for each.
"""

import argparse
import time

import numpy as np
import psutil

from envs import base
from gigpo_jax import env_pool

# What to call it: environment and its arguments.
_SUBJECTS = {
  'alfworld, native': ('alfworld', {'engine': 'native'}),
  'alfworld, textworld': ('alfworld', {'engine': 'textworld'}),
  'webshop': ('webshop', {}),
}


def measure(subject: str, num_envs: int, num_workers: int, steps: int) -> str:
  """Returns a table row of one environment."""
  rng = np.random.default_rng(0)
  name, kwargs = _SUBJECTS[subject]
  with env_pool.EnvPool(
    name,
    kwargs | {'prompt_style': 'brief'},
    num_envs=num_envs,
    num_workers=num_workers,
    step_timeout_secs=120,
    reset_timeout_secs=600,
    envs_per_group=8,
  ) as pool:

    def wave(submit) -> dict:
      for env in range(num_envs):
        submit(env)
      answers = {}
      while len(answers) < num_envs:
        answers.update(pool.receive())
      failed = [a for a in answers.values() if isinstance(a, env_pool.Failure)]
      if failed:
        raise RuntimeError(failed[0].reason)
      return answers

    wave(lambda env: pool.reset(env, base.Task('train', 3000)))
    begin = time.monotonic()
    answers = wave(lambda env: pool.reset(env, base.Task('train', env // 8)))
    reset_secs = time.monotonic() - begin
    observations = dict(answers)
    begin = time.monotonic()
    for _ in range(steps):

      def step(env: int) -> None:
        actions = observations[env].actions
        action = actions[rng.integers(len(actions))]
        pool.step(env, f'<think>x</think><action>{action}</action>')

      for env, answer in wave(step).items():
        if answer.observation is not None:
          observations[env] = answer.observation
    step_secs = time.monotonic() - begin
    memory = sum(
      child.memory_info().rss for child in psutil.Process().children()
    )
  return (
    f'| {subject} | {num_envs} | {num_workers} '
    f'| {num_envs * steps / step_secs:,.0f} | {reset_secs:.2f} '
    f'| {memory / 2**20:,.0f} | {memory / 2**20 / num_envs:.1f} |'
  )


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--envs', type=int, default=128)
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--steps', type=int, default=10)
  options = parser.parse_args()
  print(
    '| environment | envs | workers | steps/s | reset all, s | MiB | MiB/env |'
  )
  print('|---|---|---|---|---|---|---|')
  for subject in _SUBJECTS:
    row = measure(subject, options.envs, options.workers, options.steps)
    print(row, flush=True)


if __name__ == '__main__':
  main()
