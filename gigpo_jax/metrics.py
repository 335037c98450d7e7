"""Compute, write and plot metrics of a run.

Output: a console line, metrics.jsonl, TensorBoard, Weights & Biases, a plot.
"""

import collections
import json
import math
import os
import pathlib
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gigpo_jax import deprecated, reward_functions, row_stats, trajectory
from gigpo_jax.runtime import console, errors, files
from gigpo_jax.tools import plots

CURVE = 'learning_curve.png'
_FILE, _WANDB_RUN_ID = 'metrics.jsonl', 'wandb_run_id'

# Metrics with these prefixes depend on timing and on which requests are decoded
# together. All other metrics are the same when a run is repeated or resumed.
NONDETERMINISTIC = ('time/', 'rollout/', 'sampler/')

# Names that `summarize` and `evaluation.summarize` use. An environment's metric
# with such a name, or with a reserved prefix, is prefixed with `_ENV_PREFIX`.
RESERVED = (
  'episode_length',
  'episode_reward',
  'episodes',
  'failed_episodes',
  'invalid_action_rate',
  'prompt_tokens',
  'response_tokens',
  'response_tokens_max',
  'revisit_rate',
  'score',
  'score_high',
  'score_low',
  'shortened_prompts',
  'success_high',
  'success_low',
  'success_rate',
  'truncated_rate',
)
_ENV_PREFIX = 'env_'
_RESERVED_PREFIXES = (
  'failed_episodes/',
  'pass_at/',
  'score_best_of/',
  'success_rate/',
  _ENV_PREFIX,
)

# Metrics of the console line, in order, with their formats.
_CONSOLE = {
  'train/success_rate': 'success {:6.1%}',
  'train/score': 'score {:5.1%}',
  'train/episode_reward': 'reward {:5.2f}',
  'train/episode_length': 'steps {:5.1f}',
  'train/invalid_action_rate': 'invalid {:5.1%}',
  'loss/total': 'loss {:+.4f}',
  'time/rollout_secs': 'rollout {:5.1f} s',
  'time/update_secs': 'update {:5.1f} s',
  'eval/score': 'EVAL score {:.1%}',
  'eval/success_rate': 'EVAL success {:.1%}',
}
_INTERVAL = ('eval/success_low', 'eval/success_high')


def wilson(
  successes: float, n: float, z: float = 1.959964
) -> tuple[float, float]:
  """Returns the Wilson score interval of a rate (E. B. Wilson, 1927).

  Args:
    successes: number of successes, in [0, n].
    n: number of trials, or of independent ones; 0 gives (0, 1).
    z: quantile of the normal distribution; the default gives 95 %.
  """
  if n == 0:
    return 0.0, 1.0
  rate = successes / n
  centre = rate + z * z / (2 * n)
  spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  scale = 1 + z * z / n
  # Rounding can exceed the unit interval by an ulp.
  low, high = (centre - spread) / scale, (centre + spread) / scale
  return max(0.0, low), min(1.0, high)


def interval_of_equal(
  value: float, n: int, lowest: float, highest: float
) -> tuple[float, float]:
  """Returns the 95 % interval of the mean of n equal values.

  A bootstrap or a t-interval would have width 0. This one reaches as far to
  each side as Wilson's for no success in n trials.

  Args:
    value: the value.
    n: number of trials.
    lowest: smallest possible value.
    highest: largest possible value.
  """
  _, half = wilson(0, n)
  return (
    max(value - half, min(lowest, value)),
    min(value + half, max(highest, value)),
  )


def summarize(
  trajectories: Sequence[trajectory.Trajectory], *, prefix: str = 'train'
) -> dict[str, float]:
  """Returns means over episodes and over their steps.

  A step that branches share counts once (`Trajectory.num_repeated`).
  An episode that the environment aborted counts as a failure with score 0.
  Failures are also counted by cause.

  Args:
    trajectories: at least one episode.
    prefix: prefix of the metric names.
  """
  steps = [step for t in trajectories for step in t.steps[t.num_repeated :]]
  metrics = {
    'success_rate': np.mean([t.success for t in trajectories]),
    'episode_reward': np.mean([t.reward for t in trajectories]),
    'episode_length': np.mean([len(t.steps) for t in trajectories]),
    'failed_episodes': sum(bool(t.failure) for t in trajectories),
    'shortened_prompts': sum(s.prompt_shortened for s in steps),
  }
  for cause, selected in _failed_by_cause(trajectories).items():
    metrics[f'failed_episodes/{cause}'] = len(selected)
  for task_type in sorted({t.task_type for t in trajectories}):
    successes = [t.success for t in trajectories if t.task_type == task_type]
    metrics[f'success_rate/{task_type}'] = np.mean(successes)
  if any(t.score is not None for t in trajectories):
    metrics['score'] = np.mean([t.score or 0.0 for t in trajectories])
  if steps:
    metrics |= {
      'invalid_action_rate': np.mean([not s.result.valid for s in steps]),
      'revisit_rate': revisit_rate(trajectories),
      'truncated_rate': np.mean([s.truncated for s in steps]),
      'response_tokens': np.mean([len(s.completion_ids) for s in steps]),
      'response_tokens_max': max(len(s.completion_ids) for s in steps),
      'prompt_tokens': np.mean([len(s.prompt_ids) for s in steps]),
    }
    by_name = collections.defaultdict(list)
    for name, value in (x for s in steps for x in s.result.metrics.items()):
      by_name[name].append(value)
    for name in sorted(by_name):
      metrics[_env_metric_name(name)] = np.mean(by_name[name])
  return {f'{prefix}/{name}': float(value) for name, value in metrics.items()}


def revisit_rate(trajectories: Sequence[trajectory.Trajectory]) -> float:
  """Returns the share of steps in a state that their episode visited before.

  States are compared as the environment's anchors, before any option of
  `algorithm.anchor` merges them. A step that branches share counts once.

  Args:
    trajectories: episodes with at least one step in all.
  """
  num_steps = num_new = 0
  for t in trajectories:
    anchors = [s.anchor for s in t.steps]
    num_steps += len(anchors) - t.num_repeated
    num_new += len(set(anchors)) - len(set(anchors[: t.num_repeated]))
  return 1 - num_new / num_steps


def _env_metric_name(name: str) -> str:
  """Returns the name for an environment's metric, avoiding reserved names."""
  reserved = name in RESERVED or name.startswith(_RESERVED_PREFIXES)
  return f'{_ENV_PREFIX}{name}' if reserved else name


def _failed_by_cause(
  trajectories: Sequence[trajectory.Trajectory],
) -> dict[str, list[trajectory.Trajectory]]:
  """Returns episodes that the environment aborted, by cause."""
  by_cause: dict[str, list[trajectory.Trajectory]] = {}
  for t in trajectories:
    if t.failure:
      by_cause.setdefault(t.cause, []).append(t)
  return dict(sorted(by_cause.items()))


def failure_report(trajectories: Sequence[trajectory.Trajectory]) -> str:
  """Returns a line about failed episodes, with an example per cause.

  Returns '' if no episode failed.
  """
  failed = [t for t in trajectories if t.failure]
  if not failed:
    return ''
  by_blamed = [
    (cause, [t for t in episodes if _blames_reward(t) == is_reward])
    for cause, episodes in _failed_by_cause(failed).items()
    for is_reward in (False, True)
  ]
  parts = [
    f'{len(episodes)} {cause}, such as {episodes[0].task} '
    f'({episodes[0].failure.partition(": ")[2]})'
    for cause, episodes in by_blamed
    if episodes
  ]
  return (
    f'{len(failed)} of {len(trajectories)} episodes failed: {"; ".join(parts)}'
  )


def _blames_reward(t: trajectory.Trajectory) -> bool:
  """Returns whether a failure is that of a reward function."""
  return t.failure.startswith(f'{t.cause}: {reward_functions.BLAMED}')


def stop_if_failed(
  trajectories: Sequence[trajectory.Trajectory], max_share: float
) -> None:
  """Reports failed episodes.

  Args:
    trajectories: all episodes.
    max_share: largest share of failed episodes.

  Raises:
    errors.RunError: if there are more, or if all episodes failed.
  """
  report = failure_report(trajectories)
  if not report:
    return
  console.log(report)
  failed = [t for t in trajectories if t.failure]
  failed_share = len(failed) / len(trajectories)
  blamed = {_blames_reward(t) for t in failed}
  wrong = ['the environment or its data'] * (False in blamed)
  wrong += ['the reward function'] * (True in blamed)
  if failed_share > max_share or failed_share == 1:
    limit = f'pool.max_failed_share={max_share}: ' * (failed_share > max_share)
    raise errors.RunError(
      f'{limit}{report}; fix {" and ".join(wrong)}, then rerun the same command'
    )


def effective_tokens(
  advantages: np.ndarray, completion_mask: np.ndarray
) -> dict[str, float]:
  """Returns how many tokens an update learns from, as metrics.

  Args:
    advantages: advantages of rows, [R], or of tokens, [R, C].
    completion_mask: True at sampled tokens, [R, C].

  Returns:
    'advantage/trained_share': share of tokens with nonzero advantage;
    'advantage/effective_tokens': (sum |A|)^2 / sum A^2 over tokens, the
    effective sample size; 'advantage/std': standard deviation over tokens.
  """
  by_token = row_stats.per_token(advantages, completion_mask)
  token_advantages = by_token[completion_mask].astype(np.float64)
  if not token_advantages.size:
    token_advantages = np.zeros(1)
  weights = np.abs(token_advantages)
  squares = np.sum(weights**2)
  return {
    'advantage/std': float(token_advantages.std()),
    'advantage/trained_share': float(np.mean(weights > 0)),
    'advantage/effective_tokens': float(
      np.sum(weights) ** 2 / squares if squares else 0.0
    ),
  }


class Writer:
  """Writes metrics.jsonl, TensorBoard and, optionally, Weights & Biases.

  Args:
    workdir: folder of the run.
    first_iteration: iteration at which the run starts or resumes. Its line,
      later lines and an incomplete last line are dropped, so that each
      iteration is stored once.
    most_repeated: maximum number of dropped lines that a kill can explain. If
      there are more, or other lines are damaged, the file is kept as
      metrics.jsonl.bak. None: no limit.
    wandb: project of Weights & Biases; '' for none.
    config: config of the run, for Weights & Biases.
  """

  def __init__(
    self,
    workdir: str | pathlib.Path,
    *,
    first_iteration: int = 0,
    most_repeated: int | None = None,
    wandb: str = '',
    config: dict[str, Any] | None = None,
  ):
    self._path = pathlib.Path(workdir) / _FILE
    self._path.parent.mkdir(parents=True, exist_ok=True)
    kept = _lines_before(self._path, first_iteration, most_repeated)
    files.write_atomic(self._path, ''.join(json.dumps(x) + '\n' for x in kept))
    self._file = self._path.open('a', encoding='utf-8')
    self._board = _Board(
      pathlib.Path(workdir) / 'tensorboard', purge_step=first_iteration
    )
    self._wandb = (
      _open_wandb(pathlib.Path(workdir), wandb, config) if wandb else None
    )

  def write(self, iteration: int, metrics: dict[str, float]) -> None:
    """Writes one iteration; values that are not finite become null."""
    finite = {
      name: float(value) if math.isfinite(value) else None
      for name, value in sorted(metrics.items())
    }
    self._file.write(json.dumps({'iteration': iteration} | finite) + '\n')
    self._file.flush()
    os.fsync(self._file.fileno())
    for name, value in finite.items():
      if value is not None:
        self._board.add_scalar(name, value, iteration)
    self._board.flush()
    if self._wandb:
      # wandb ignores iterations that it already has. A resumed run repeats the
      # same values.
      known = {k: v for k, v in finite.items() if v is not None}
      self._wandb.log(known, step=iteration)

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    self._board.close()
    if self._wandb:
      self._wandb.finish()


def no_update(*, has_critic: bool) -> dict[str, float]:
  """Returns the metrics of an iteration without an update."""
  metrics = effective_tokens(np.zeros(0), np.zeros((0, 0), bool))
  names = ['update/count', 'update/tokens', 'update/grad_norm']
  names += ['critic/count'] if has_critic else []
  return metrics | dict.fromkeys(names, 0.0)


def _open_wandb(
  workdir: pathlib.Path, project: str, config: dict[str, Any] | None
) -> Any:
  """Returns the Weights & Biases run of a work directory.

  A resumed run continues the same wandb run. Without an API key the run is
  stored in the work directory, for `wandb sync`. wandb neither prompts nor
  waits for the network.
  """
  # wandb is an optional dependency and slow to import.
  import wandb

  run_id = read_wandb_run_id(workdir)
  if run_id is None:
    run_id = secrets.token_hex(4)
    files.write_atomic(workdir / _WANDB_RUN_ID, run_id)
  mode = os.environ.get('WANDB_MODE')
  return wandb.init(
    project=project,
    name=workdir.name,
    id=run_id,
    resume='allow',
    dir=str(workdir),
    config=config,
    mode=mode or ('online' if wandb.api.api_key else 'offline'),
    settings=wandb.Settings(console='off', silent=True),
  )


def read_wandb_run_id(workdir: str | pathlib.Path) -> str | None:
  """Returns the id of a work directory's wandb run; None if it has none.

  Raises:
    ValueError: in one line, if the file with the id is damaged.
  """
  path = pathlib.Path(workdir) / _WANDB_RUN_ID
  if not path.exists():
    return None
  try:
    run_id = path.read_text(encoding='utf-8').strip()
  except (OSError, UnicodeError) as error:
    raise ValueError(f'{path}: cannot be read ({error})') from error
  if not re.fullmatch(r'[\w-]{1,64}', run_id, re.ASCII):
    raise ValueError(
      f'{path}: not the id of a wandb run ({run_id!r:.80}); must be letters, '
      'digits, - and _; delete the file to start another wandb run'
    )
  return run_id


class _Board:
  """Writes TensorBoard events in the calling thread.

  `tensorboardX.SummaryWriter` writes in a background thread. A full disk would
  end that thread, and writing would wait for it forever.
  """

  def __init__(self, folder: pathlib.Path, *, purge_step: int):
    # tensorboardX imports PyTorch if it is installed, which takes a second.
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2

    self._make_event, self._make_scalar = event_pb2.Event, summary.scalar
    folder.mkdir(exist_ok=True)
    self._events = event_file_writer.EventsWriter(str(folder / 'events'))
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(purge_step, session_log=start)

  def add_scalar(self, name: str, value: float, step: int) -> None:
    self._write(step, summary=self._make_scalar(name, value))

  def _write(self, step: int, **fields) -> None:
    now = time.time()
    self._events.write_event(
      self._make_event(wall_time=now, step=step, **fields)
    )

  def flush(self) -> None:
    self._events.flush()

  def close(self) -> None:
    self._events.close()


class NullWriter:
  """A `Writer` that discards metrics, for all but the main process."""

  def write(self, iteration: int, metrics: dict[str, float]) -> None:
    """Discards the metrics."""

  def close(self) -> None:
    """Does nothing."""


def read(workdir: str | pathlib.Path) -> list[dict]:
  """Returns the valid lines of a run's metrics.jsonl."""
  return _read(pathlib.Path(workdir) / _FILE)[0]


def is_older(path: pathlib.Path, workdir: str | pathlib.Path) -> bool:
  """Returns whether a file is older than the last line of metrics.jsonl."""
  last = (pathlib.Path(workdir) / _FILE).stat().st_mtime_ns
  return path.stat().st_mtime_ns < last


def _read(path: pathlib.Path) -> tuple[list[dict], int]:
  """Returns the valid lines and the number of damaged lines.

  An incomplete last line, as a kill leaves it, is not counted.
  """
  if not path.exists():
    return [], 0
  try:
    text = path.read_text(encoding='utf-8', errors='replace')
  except OSError as error:
    raise ValueError(f'{path}: cannot be read ({error})') from error
  lines = [x for x in text.split('\n')[:-1] if x.strip()]
  parsed = [_parse(line) for line in lines]
  valid = [line for line in parsed if line is not None]
  return valid, len(lines) - len(valid)


def _parse(text: str) -> dict | None:
  """Returns a line of metrics.jsonl; None if it is damaged."""
  try:
    # JSON has no such numbers; Python's writes and reads them.
    line = json.loads(text, parse_constant=lambda _: None)
  except (ValueError, RecursionError):
    return None
  if not isinstance(line, dict) or not isinstance(line.get('iteration'), int):
    return None
  numeric = all(x is None or _is_number(x) for x in line.values())
  is_valid = numeric and line['iteration'] >= 0
  return deprecated.renamed_metrics(line) if is_valid else None


def _is_number(value: object) -> bool:
  """Returns whether a value of JSON is a number that a float can hold."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return False
  try:
    return math.isfinite(float(value))
  except OverflowError:
    return False


def _lines_before(
  path: pathlib.Path, first_iteration: int, most_repeated: int | None
) -> list[dict]:
  """Returns the lines before an iteration, one per iteration.

  Prints a warning if iterations are missing. If lines would be lost that a kill
  cannot explain, keeps a copy of the file and prints its name.
  """
  lines, damaged = _read(path)
  kept = {x['iteration']: x for x in lines if x['iteration'] < first_iteration}
  problems = []
  if missing := first_iteration - len(kept):
    first_missing = next(n for n in range(first_iteration) if n not in kept)
    problems.append(
      f'{missing} of the {first_iteration} iterations up to the checkpoint are '
      f'missing, from iteration {first_missing} on'
    )
  if damaged:
    problems.append(f'{damaged} lines are damaged')
  repeated = sum(x['iteration'] >= first_iteration for x in lines)
  if most_repeated is not None and repeated > most_repeated:
    problems.append(
      f'{repeated} lines from iteration {first_iteration} on have no checkpoint'
    )
  if problems:
    # No copy is needed if the file stays as it is.
    lossless = not damaged and repeated == 0 and _ends_with_newline(path)
    backup = None if lossless else files.back_up(path)
    print(
      f'{path}: {"; ".join(problems)}'
      + (f'; the file is kept as {backup.name}' if backup else ''),
      flush=True,
    )
  return [kept[n] for n in sorted(kept)]


def _ends_with_newline(path: pathlib.Path) -> bool:
  """Returns whether a file is missing, empty or ends with a newline."""
  return not path.exists() or path.read_bytes()[-1:] in (b'', b'\n')


def console_line(iteration: int, metrics: dict[str, float]) -> str:
  """Returns one readable line about an iteration; skips absent metrics."""
  parts = [f'iteration {iteration:4d}']
  parts += [
    form.format(metrics[name])
    for name, form in _CONSOLE.items()
    if name in metrics
  ]
  if all(name in metrics for name in _INTERVAL):
    parts[-1] += ' [{:.1%}, {:.1%}]'.format(*(metrics[n] for n in _INTERVAL))
  if metrics.get('update/count') == 0:
    parts.append('no update')
    if metrics.get('filter/groups_kept') == 0:
      parts[-1] += ': the filter kept no group'
  return '  '.join(parts)


def plot(
  workdir: str | pathlib.Path, published: dict[str, float] | None = None
) -> str:
  """Draws WORKDIR/learning_curve.png from the metrics; returns its path.

  Args:
    workdir: folder of the run.
    published: published success rates in [0, 1] to compare with, by label.
  """
  lines = read(workdir)
  path = str(pathlib.Path(workdir) / CURVE)
  with plots.image(path, figsize=(7, 4)) as (_, axes):
    _draw(axes, lines, 'train/success_rate', '-', '0.6', 'training episodes')
    name, color = 'evaluation', 'tab:blue'
    x, low = _series(lines, _INTERVAL[0])
    if x:
      name += ', 95 % interval'
      _, high = _series(lines, _INTERVAL[1])
      axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    _draw(axes, lines, 'eval/success_rate', 'o-', color, name)
    for n, (label, rate) in enumerate((published or {}).items()):
      axes.axhline(
        100 * rate,
        color=f'C{n + 1}',
        linestyle='--',
        label=f'published: {label}',
      )
    episodes = [line.get('spent/episodes') or 0 for line in lines]
    axes.set(
      xlabel=f'iteration ({max(episodes, default=0):,.0f} episodes in total)',
      ylabel='success (%)',
      # Leave room for lines and markers at 0 and 100.
      ylim=(-2, 102),
      title=pathlib.Path(workdir).name,
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
      axes.legend(loc='best')
  return path


def _series(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
  """Returns the iterations that have the metric, and its values in %."""
  selected = [line for line in lines if line.get(name) is not None]
  iterations = [line['iteration'] for line in selected]
  return iterations, [100 * line[name] for line in selected]


def _draw(
  axes: Any, lines: list[dict], name: str, style: str, color: str, label: str
) -> None:
  x, y = _series(lines, name)
  if x:
    # A line of one point would not be visible.
    axes.plot(x, y, style if len(x) > 1 else 'o', color=color, label=label)
