"""Benchmark many environments in few processes: steps/s, resets, memory.

    python benchmarks/env_pool.py --envs 128 --workers 2

Plays full-size generated ALFWorld games on both engines and the generated shop
(`--webshop_data`: official files). As in training, groups of 8 share a task.
Actions are drawn uniformly from the admissible ones. A finished episode is
reset, which counts as a step. Prints one table row per environment. Private
memory is what ending a process would free; it excludes memory that workers
share.
"""

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
import psutil

from envs import base
from gigpo_jax import env_pool

# By label: (environment, arguments).
_SUBJECTS = {
  'alfworld, native': ('alfworld', {'engine': 'native'}),
  'alfworld, textworld': ('alfworld', {'engine': 'textworld'}),
  'webshop': ('webshop', {}),
}


def measure(
  subject: str,
  num_envs: int,
  num_workers: int,
  steps: int,
  webshop_data: str | None,
) -> str:
  """Returns a table row of one environment."""
  rng = np.random.default_rng(0)
  name, kwargs = _SUBJECTS[subject]
  if name == 'webshop':
    kwargs = kwargs | {'data_dir': webshop_data}
  start = time.monotonic()
  with env_pool.EnvPool(
    name,
    kwargs | {'prompt_style': 'brief'},
    num_envs=num_envs,
    num_workers=num_workers,
    step_timeout_secs=120,
    reset_timeout_secs=600,
    envs_per_group=8,
  ) as pool:
    _call_all(pool, lambda env: pool.reset(env, base.Task('train', 3000)))
    start_secs = time.monotonic() - start
    start = time.monotonic()
    last = _call_all(pool, lambda env: pool.reset(env, _task(env)))
    reset_secs = time.monotonic() - start
    start = time.monotonic()
    for _ in range(steps):
      last = _call_all(pool, functools.partial(_step_or_reset, pool, rng, last))
    step_secs = time.monotonic() - start
    memory_infos = [c.memory_full_info() for c in psutil.Process().children()]
    resident = sum(memory.rss for memory in memory_infos) / 2**20
    private = sum(memory.uss for memory in memory_infos) / 2**20
  return (
    f'| {subject} | {num_envs} | {num_workers} | {start_secs:.1f} '
    f'| {num_envs * steps / step_secs:,.0f} | {reset_secs:.2f} '
    f'| {resident:,.0f} | {private:,.0f} | {private / num_envs:.1f} |'
  )


def _task(env: int) -> base.Task:
  return base.Task('train', env // 8)


def _call_all(pool: env_pool.EnvPool, submit: Callable[[int], None]) -> dict:
  """Submits a call to each environment; returns their results."""
  for env in range(pool.num_envs):
    submit(env)
  results = {}
  while len(results) < pool.num_envs:
    results.update(pool.receive())
  failed = [a for a in results.values() if isinstance(a, env_pool.Failure)]
  if failed:
    raise RuntimeError(failed[0].reason)
  return results


def _step_or_reset(
  pool: env_pool.EnvPool,
  rng: np.random.Generator,
  last: dict[int, base.Observation | base.StepResult],
  env: int,
) -> None:
  result = last[env]
  after_reset = isinstance(result, base.Observation)
  observation = result if after_reset else result.observation
  if observation is None:
    pool.reset(env, _task(env))
    return
  action = observation.actions[rng.integers(len(observation.actions))]
  pool.step(env, f'<think>x</think><action>{action}</action>')


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--envs', type=int, default=128)
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--steps', type=int, default=10)
  parser.add_argument('--webshop_data', help='folder of the official files')
  parser.add_argument(
    '--only', choices=_SUBJECTS, help='measure only this environment'
  )
  options = parser.parse_args()
  print(
    '| environment | envs | workers | start, s | steps/s | reset all, s '
    '| resident MiB | private MiB | private MiB/env |'
  )
  print('|---|---|---|---|---|---|---|---|---|')
  for subject in [options.only] if options.only else _SUBJECTS:
    row = measure(
      subject,
      options.envs,
      options.workers,
      options.steps,
      options.webshop_data,
    )
    print(row, flush=True)


if __name__ == '__main__':
  main()
