r"""Benchmark the export of a run as a web page.

    python benchmarks/viewer.py --groups=128 --members=8

Writes one iteration of generated episodes and exports it as one HTML file.
Texts are sentences of a household game, encoded with the tokenizer of
`configs/alfworld.py:tiny`.
"""

import argparse
import cProfile
import pathlib
import pstats
import tempfile
import time

import numpy as np

from envs import base
from gigpo_jax import episode_records, episodes, tokenizer, trajectory
from gigpo_jax.tools import viewer

_TEXT = pathlib.Path(__file__).parents[1] / 'configs/warm_starts/alfworld_tiny'
_PLACES = ('cabinet', 'drawer', 'fridge', 'countertop', 'sinkbasin', 'shelf')
_ITEMS = ('mug', 'apple', 'knife', 'plate', 'tomato', 'pan', 'bread', 'cup')


def _sentence(rng: np.random.Generator) -> str:
  receptacle, item = rng.choice(_PLACES), rng.choice(_ITEMS)
  return (
    f'You arrive at {receptacle} {rng.integers(1, 9)}. On the {receptacle}, '
    f'you see a {item} {rng.integers(1, 9)}.'
  )


def _step(
  text: tokenizer.Tokenizer,
  rng: np.random.Generator,
  options: argparse.Namespace,
) -> trajectory.Step:
  observation = _sentence(rng)
  history = ' '.join(_sentence(rng) for _ in range(options.sentences))
  action = f'take {rng.choice(_ITEMS)} {rng.integers(1, 9)}'
  response = f'<think>{_sentence(rng)}</think><action>{action}</action>'
  ids = text.encode([response])[0]
  return trajectory.Step(
    prompt_ids=text.render([f'{history} {observation}'])[0],
    completion_ids=ids,
    log_probs=-rng.exponential(0.4, len(ids)).astype(np.float32),
    truncated=False,
    prompt_shortened=False,
    anchor=observation,
    observation=observation,
    response=response,
    result=base.StepResult(None, 0.0, True, action, False, False),
  )


def _write(folder: pathlib.Path, options: argparse.Namespace) -> int:
  """Writes the episodes; returns their number of tokens."""
  text = tokenizer.Tokenizer(str(_TEXT))
  rng = np.random.default_rng(0)
  # Repeating 400 distinct steps is as slow to export as distinct steps.
  steps = [_step(text, rng, options) for _ in range(400)]
  records, tokens = [], 0
  for group in range(options.groups):
    task = base.Task('train', group)
    for member in range(options.members):
      episode_steps = [
        steps[n] for n in rng.integers(len(steps), size=options.steps)
      ]
      tokens += sum(
        len(s.prompt_ids) + len(s.completion_ids) for s in episode_steps
      )
      episode = trajectory.Trajectory(
        task, 'pick', group, member, tuple(episode_steps)
      )
      records.append(
        episode_records.make_record(
          episode, iteration=0, seed=0, step_fields={}
        )
      )
  log = episodes.EpisodeWriter(folder / 'episodes', text, seed=0)
  log.append(0, records)
  return tokens


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--groups', type=int, default=128)
  parser.add_argument('--members', type=int, default=8)
  parser.add_argument('--steps', type=int, default=20)
  parser.add_argument(
    '--sentences', type=int, default=6, help='sentences of a prompt'
  )
  parser.add_argument('--profile', action='store_true')
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    tokens = _write(root, options)
    profile = cProfile.Profile()
    start, cpu_start = time.perf_counter(), time.process_time()
    if options.profile:
      profile.runcall(viewer.export, root, root / 'run.html')
    else:
      viewer.export(root, root / 'run.html')
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    size = (root / 'run.html').stat().st_size / 2**20
  print(
    f'{options.groups * options.members} episodes of {options.steps} steps, '
    f'{tokens / 1e6:.1f}M tokens: {seconds:.1f} s, {cpu_seconds:.1f} '
    f'CPU seconds, {size:.1f} MiB'
  )
  if options.profile:
    pstats.Stats(profile).sort_stats('cumulative').print_stats(25)


if __name__ == '__main__':
  main()
