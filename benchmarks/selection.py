"""Benchmark the update time that D3S saves.

D3S (`--config=...:d3s`) drops rows and tokens before the update. It needs
entropies, which come from the forward pass of the old log-probs;
`loss.old_log_probs=sampler` would otherwise save this pass. An update of all
rows, updates of the rows that D3S keeps at the start and at the end of a run,
and the forward pass run in alternating rounds, in one process:

    taskset -c 0 python benchmarks/selection.py --repeats 5

Prints shares of rows and tokens, and CPU seconds relative to an update of all
rows. Advantages are random; D3S keeps the same number of rows for any.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import learner as learner_benchmark
import models
import numpy as np

from gigpo_jax import batch, learner, mesh, plugins, selectors
from gigpo_jax.selectors import d3s

PROMPT, COMPLETION = 320, 40  # Limits of ALFWorld's :tiny.
BUCKETS = (160, 192, 224, PROMPT + COMPLETION)


def make_rows(count: int, vocab_size: int) -> batch.Rows:
  """Returns rows with the lengths of ALFWorld's :tiny."""
  rng = np.random.default_rng(0)
  draw = functools.partial(rng.integers, 2, vocab_size)
  prompts = np.clip(rng.normal(170, 40, count), 90, PROMPT).astype(int)
  completions = np.clip(rng.normal(24, 5, count), 8, COMPLETION).astype(int)
  return learner_benchmark.make_rows(
    [draw(size=n) for n in prompts], [draw(size=n) for n in completions], PROMPT
  )


def select(
  rows: batch.Rows, advantages: np.ndarray, progress: float
) -> tuple[batch.Rows, np.ndarray]:
  """Returns the rows and the tokens that D3S keeps, with random entropies."""
  rng = np.random.default_rng(1)
  entropies = rng.gamma(1.0, 0.5, rows.completion_mask.shape)
  signals = plugins.Signals({'entropies': entropies}, progress)
  kept, trained, _ = selectors.apply(
    (d3s.Selector(),), advantages, rows, signals
  )
  return kept, trained


def make_update(
  subject: learner.Learner,
  params: Callable[[], dict],
  rows: batch.Rows,
  trained: np.ndarray | None,
  advantages: np.ndarray,
) -> Callable[[], None]:
  """Returns an update of some rows and tokens that can be repeated."""
  states = [subject.init(params())]
  columns = {
    'advantages': advantages,
    'old_log_probs': rows.sampler_log_probs,
    'ref_log_probs': rows.sampler_log_probs,
    'importance': 1.0,
  }

  def update() -> None:
    state, _ = subject.update(
      states.pop(),
      rows,
      iteration=0,
      trained=trained,
      **{name: columns[name] for name in subject.columns},
    )
    states.append(jax.block_until_ready(state))

  return update


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rows', type=int, default=256)
  parser.add_argument('--repeats', type=int, default=5)
  options = parser.parse_args()
  model = models.TINY
  rows = make_rows(options.rows, model.vocab_size)
  advantages = np.random.default_rng(2).normal(size=options.rows)
  advantages = advantages.astype(np.float32)
  subject = learner_benchmark.make_learner(
    model,
    BUCKETS,
    COMPLETION,
    minibatch_rows=options.rows,
    microbatch_tokens=8 * BUCKETS[-1],
    signals=('log_probs', 'entropies'),
  )
  params = functools.partial(
    models.random_params, model, mesh.make_mesh(1, -1, 1)
  )
  chosen = {'all rows': (rows, None)}
  for name, progress in (('d3s, start', 0.0), ('d3s, end', 1.0)):
    chosen[name] = select(rows, advantages, progress)
  steps = {
    name: make_update(subject, params, kept, trained, advantages)
    for name, (kept, trained) in chosen.items()
  }
  fixed = params()
  steps['forward pass'] = lambda: subject.signals(fixed, rows)
  secs: dict[str, list[float]] = {name: [] for name in steps}
  for step in steps.values():
    step()
  for _ in range(options.repeats):
    for name, step in steps.items():
      start = time.process_time()
      step()
      secs[name].append(time.process_time() - start)
  everything = secs['all rows']
  print('| | rows | trained tokens | CPU time (range over rounds) |')
  print('|---|---|---|---|')
  for name, times in secs.items():
    kept, trained = chosen.get(name, (rows, None))
    tokens = kept.completion_mask[kept.real].sum() if trained is None else 0
    tokens = tokens if trained is None else trained.sum()
    ratios = [t / e for t, e in zip(times, everything, strict=True)]
    print(
      f'| {name} | {kept.real.mean():.0%} | '
      f'{tokens / rows.completion_mask.sum():.0%} | '
      f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to '
      f'{max(ratios):.2f}) |'
    )
  print(f'{statistics.median(everything):.1f} CPU seconds for all rows')


if __name__ == '__main__':
  main()
