"""What a run says: numbers of an iteration, a line, a file, a picture."""

import json
import math
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorboardX

from gigpo_jax import trajectory

_FILE = 'metrics.jsonl'


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
  """Returns Wilson's 95 % interval of a rate (E. B. Wilson, 1927)."""
  if n == 0:
    return 0.0, 1.0
  rate = successes / n
  centre = rate + z * z / (2 * n)
  spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  scale = 1 + z * z / n
  return (centre - spread) / scale, (centre + spread) / scale


def summarize(
  trajectories: Sequence[trajectory.Trajectory], *, prefix: str = 'train'
) -> dict[str, float]:
  """Returns means over episodes and over their steps.

  An episode that the environment broke off counts as not successful.

  Args:
    trajectories: at least one.
    prefix: of the names.
  """
  steps = [step for t in trajectories for step in t.steps]
  values = {
    'success_rate': np.mean([t.success for t in trajectories]),
    'episode_reward': np.mean([t.reward for t in trajectories]),
    'episode_length': np.mean([len(t.steps) for t in trajectories]),
    'failed_episodes': sum(bool(t.failure) for t in trajectories),
    'shortened_prompts': sum(s.prompt_shortened for s in steps),
  }
  for kind in sorted({t.kind for t in trajectories}):
    of_kind = [t.success for t in trajectories if t.kind == kind]
    values[f'success_rate/{kind}'] = np.mean(of_kind)
  if steps:
    values |= {
      'invalid_action_rate': np.mean([not s.result.valid for s in steps]),
      'truncated_rate': np.mean([s.truncated for s in steps]),
      'response_tokens': np.mean([len(s.completion_ids) for s in steps]),
      'prompt_tokens': np.mean([len(s.prompt_ids) for s in steps]),
    }
    for name in sorted({name for s in steps for name in s.result.metrics}):
      found = [
        s.result.metrics[name] for s in steps if name in s.result.metrics
      ]
      values[name] = np.mean(found)
  return {f'{prefix}/{name}': float(v) for name, v in values.items()}


class Writer:
  """Appends to metrics.jsonl and TensorBoard.

  Args:
    workdir: folder of the run.
    first_iteration: where the run begins or resumes; lines from there on, and
      a line that was torn by a kill, are dropped, so that every iteration is
      there once.
  """

  def __init__(self, workdir: str, *, first_iteration: int = 0):
    self._path = pathlib.Path(workdir) / _FILE
    self._path.parent.mkdir(parents=True, exist_ok=True)
    kept = [
      json.dumps(line)
      for line in read(workdir)
      if line['iteration'] < first_iteration
    ]
    # Written beside and renamed: a kill here must not lose the file.
    beside = self._path.with_suffix('.tmp')
    beside.write_text(''.join(line + '\n' for line in kept), encoding='utf-8')
    os.replace(beside, self._path)
    self._file = self._path.open('a', encoding='utf-8')
    self._board = tensorboardX.SummaryWriter(
      str(pathlib.Path(workdir) / 'tensorboard'), purge_step=first_iteration
    )

  def write(self, iteration: int, metrics: dict[str, float]) -> None:
    """Writes one iteration; what is not finite becomes null."""
    finite = {
      name: value if math.isfinite(value) else None
      for name, value in sorted(metrics.items())
    }
    self._file.write(json.dumps({'iteration': iteration} | finite) + '\n')
    self._file.flush()
    os.fsync(self._file.fileno())
    for name, value in finite.items():
      if value is not None:
        self._board.add_scalar(name, value, iteration)
    self._board.flush()

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    self._board.close()


def read(workdir: str) -> list[dict]:
  """Returns the lines of a run's metrics.jsonl that are whole."""
  path = pathlib.Path(workdir) / _FILE
  lines = []
  if path.exists():
    for line in path.read_text(encoding='utf-8').splitlines(keepends=True):
      if line.endswith('\n'):
        lines.append(json.loads(line))
  return lines


def console_line(iteration: int, metrics: dict[str, float]) -> str:
  """Returns one readable line about an iteration."""
  parts = [f'iteration {iteration:4d}']
  if 'train/success_rate' in metrics:
    parts += [
      f'success {metrics["train/success_rate"]:6.1%}',
      f'reward {metrics["train/episode_reward"]:5.2f}',
      f'steps {metrics["train/episode_length"]:5.1f}',
      f'invalid {metrics.get("train/invalid_action_rate", 0):5.1%}',
      f'loss {metrics["loss/total"]:+.4f}',
      f'rollout {metrics["time/rollout_secs"]:5.1f} s',
      f'update {metrics["time/update_secs"]:5.1f} s',
    ]
  if 'eval/success_rate' in metrics:
    parts.append(
      f'EVAL success {metrics["eval/success_rate"]:.1%} '
      f'[{metrics["eval/success_low"]:.1%}, '
      f'{metrics["eval/success_high"]:.1%}]'
    )
  return '  '.join(parts)


def plot(workdir: str) -> str:
  """Draws WORKDIR/learning_curve.png from the metrics; returns its path."""
  # Slow to import, and only a finished run needs it.
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  lines = read(workdir)
  figure, axes = pyplot.subplots(figsize=(7, 4), layout='constrained')
  train = [line for line in lines if 'train/success_rate' in line]
  axes.plot(
    [line['iteration'] for line in train],
    [100 * line['train/success_rate'] for line in train],
    color='0.7',
    label='training episodes',
  )
  held_out = [line for line in lines if 'eval/success_rate' in line]
  if held_out:
    x = [line['iteration'] for line in held_out]
    axes.plot(
      x,
      [100 * line['eval/success_rate'] for line in held_out],
      'o-',
      color='tab:blue',
      label='unseen tasks, 95 % interval',
    )
    axes.fill_between(
      x,
      [100 * line['eval/success_low'] for line in held_out],
      [100 * line['eval/success_high'] for line in held_out],
      color='tab:blue',
      alpha=0.15,
    )
  axes.set(
    xlabel='iteration',
    ylabel='success (%)',
    ylim=(0, 100),
    title=pathlib.Path(workdir).name,
  )
  axes.grid(alpha=0.3)
  axes.legend(loc='lower right')
  path = str(pathlib.Path(workdir) / 'learning_curve.png')
  figure.savefig(path, dpi=120)
  pyplot.close(figure)
  return path
