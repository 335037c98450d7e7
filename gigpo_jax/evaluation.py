"""Evaluate policies on fixed held-out tasks, with 95 % intervals.

The evaluation tasks are the first tasks of a split, and their random streams
are fixed. Two policies are therefore compared on the same tasks and noise.
"""

import dataclasses
import fractions
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from envs import base
from gigpo_jax import (
  builders,
  env_pool,
  metrics,
  options,
  sampling,
  tokenizer,
  trajectory,
)
from gigpo_jax import config as config_lib
from gigpo_jax.run import (
  model_builders,
  policy_files,
  run_config,
  saved_checkpoint,
  trial,
)
from gigpo_jax.runtime import console, distributed, errors, files
from gigpo_jax.tools import plots

_RESAMPLES = 10_000
_DECIMALS = 12  # Further ones of a mean depend on the order of summation.
_MAX_LABEL = 60  # Characters of a policy's name in the plot.
# Files in the work directory, and the folder of kept episodes.
_REPORT, _PLOT, _KEPT = 'evaluation.json', 'evaluation.png', 'evaluation'


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of evaluations, `config.evaluation`; see configs/base.py."""

  split: str | None = None
  num_tasks: int = options.number(0, low=0, note='0 is all')
  every: int = options.number(5, low=0, note='0 is never')
  repeats: int = options.number(1, low=1)
  inside_rollout: bool = False
  temperature: float = sampling.temperature_field(0.4)
  top_p: float = options.number(1.0, above=0, high=1)
  top_k: int = options.number(0, low=0, note='0 is off')
  min_p: float = options.number(0.0, low=0, high=1, note='0 is off')

  def __post_init__(self):
    options.check(self)
    if self.repeats > 1 and not self.temperature:
      raise ValueError(
        f'repeats={self.repeats}: greedy episodes of a task are equal; must be '
        '1 with temperature=0'
      )


def summarize(
  trajectories: Sequence[trajectory.Trajectory],
) -> dict[str, float]:
  """Returns success rates and lengths of episodes as metrics 'eval/...'.

  An episode that the environment aborted counts as a failure and is also
  counted in a metric of its own.
  """
  low, high = success_interval(trajectories)
  values = metrics.summarize(trajectories, prefix='eval') | {
    'eval/success_low': low,
    'eval/success_high': high,
    'eval/episodes': float(len(trajectories)),
  }
  if 'eval/score' in values:
    low, high = _bootstrap(
      [np.mean(scores) for scores in _by_task(trajectories, _score).values()],
      lowest=0,
    )
    values |= {'eval/score_low': low, 'eval/score_high': high}
    values |= _best_of(trajectories, 'score_best_of', _score)
  return values | _best_of(trajectories, 'pass_at', _success)


def _best_of(
  trajectories: Sequence[trajectory.Trajectory],
  name: str,
  value: Callable[[trajectory.Trajectory], float],
) -> dict[str, float]:
  """Returns the mean over tasks of the best of k episodes, as 'eval/NAME/k'.

  k is 2, 4, 8, ..., up to the smallest number of episodes of a task.
  """
  tasks = list(_by_task(trajectories, value).values())
  sizes = [2**n for n in range(1, min(map(len, tasks)).bit_length())]
  means = {
    f'{name}/{k}': np.mean([best_at_k(values, k) for values in tasks])
    for k in sizes
  }
  return {f'eval/{name}': float(mean) for name, mean in means.items()}


def best_at_k(values: Sequence[float], k: int) -> float:
  """Returns the mean over all subsets of k values of their largest one.

  For successes (1) and failures (0), this is the unbiased estimate of pass@k
  (arXiv:2107.03374, Eq. 1), 1 - C(failures, k) / C(n, k).

  Args:
    values: values of the n episodes of a task.
    k: size of the subsets, in [1, n].
  """
  # The i-th smallest value is the largest of C(i - 1, k - 1) subsets. Such
  # counts can exceed the range of floats.
  total = sum(
    math.comb(smaller, k - 1) * fractions.Fraction(float(value))
    for smaller, value in enumerate(sorted(values))
  )
  return float(total / math.comb(len(values), k))


def success_interval(
  trajectories: Sequence[trajectory.Trajectory],
) -> tuple[float, float]:
  """Returns a 95 % interval of the success rate.

  Wilson's interval if each task was played once or all tasks have the same
  rate. Otherwise a bootstrap over tasks, because episodes of a task are not
  independent.
  """
  shares = [np.mean(outcomes) for outcomes in _by_task(trajectories).values()]
  if len(shares) == len(trajectories) or min(shares) == max(shares):
    return metrics.wilson(float(sum(shares)), len(shares))
  return _bootstrap(shares, lowest=0)


def _success(t: trajectory.Trajectory) -> float:
  return float(t.success)


def _score(t: trajectory.Trajectory) -> float:
  return t.score or 0.0


def _by_task(
  trajectories: Sequence[trajectory.Trajectory],
  value: Callable[[trajectory.Trajectory], float] = _success,
) -> dict[base.Task, list[float]]:
  by_task: dict[base.Task, list[float]] = {}
  for t in trajectories:
    by_task.setdefault(t.task, []).append(value(t))
  return by_task


def _bootstrap(
  values: Sequence[float], *, lowest: float
) -> tuple[float, float]:
  """Returns a 95 % bootstrap interval of a mean (percentiles, seed 0).

  Args:
    values: numbers from `lowest` to 1; see `metrics.interval_of_equal` for
      equal ones.
    lowest: the smallest possible value.
  """
  values = np.asarray(values, float)
  if np.ptp(values) == 0:
    return metrics.interval_of_equal(float(values[0]), len(values), lowest, 1)
  rng = np.random.default_rng(0)
  means = [
    values[rng.integers(len(values), size=len(values))].mean()
    for _ in range(_RESAMPLES)
  ]
  low, high = np.percentile(means, [2.5, 97.5])
  return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Paired comparison of two policies on the same tasks.

  Attributes:
    difference: mean of the first policy minus mean of the second.
    low: lower end of the 95 % bootstrap interval over tasks.
    high: upper end.
    better: number of tasks on which the first policy is better.
    worse: number of tasks on which it is worse.
    p: two-sided p-value of the sign test on these tasks.
  """

  difference: float
  low: float
  high: float
  better: int
  worse: int
  p: float

  def __str__(self) -> str:
    return (
      f'{100 * self.difference:+.1f} points '
      f'[{100 * self.low:+.1f}, {100 * self.high:+.1f}], better on '
      f'{self.better} and worse on {self.worse} tasks, p = {self.p:.2g}'
    )


def compare(
  one: Sequence[trajectory.Trajectory],
  other: Sequence[trajectory.Trajectory],
) -> dict[str, Comparison]:
  """Compares the episodes of two policies task by task.

  Args:
    one: episodes of the first policy.
    other: episodes of the second policy, on the same tasks.

  Returns:
    Comparisons of 'success' and, if the environment reports it, 'score'.

  Raises:
    ValueError: if the policies played different tasks.
  """
  measures = {'success': _success}
  if any(t.score is not None for t in (*one, *other)):
    measures['score'] = _score
  return {
    name: _compare_tasks(_by_task(one, value), _by_task(other, value))
    for name, value in measures.items()
  }


def _compare_tasks(
  first: dict[base.Task, list[float]], second: dict[base.Task, list[float]]
) -> Comparison:
  if first.keys() != second.keys():
    raise ValueError(
      'other: has different tasks; must have the tasks of the first policy'
    )
  gaps = np.array(
    [np.mean(first[task]) - np.mean(second[task]) for task in first]
  )
  gaps = gaps.round(_DECIMALS)
  better, worse = int((gaps > 0).sum()), int((gaps < 0).sum())
  low, high = _bootstrap(gaps, lowest=-1)
  return Comparison(
    float(gaps.mean()), low, high, better, worse, sign_test(better, worse)
  )


def sign_test(better: int, worse: int) -> float:
  """Returns the two-sided p-value of a sign test.

  Args:
    better: number of positive differences.
    worse: number of negative differences.
  """
  n = better + worse
  tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
  return min(1.0, 2 * tail / 2**n)


def table(name: str, trajectories: Sequence[trajectory.Trajectory]) -> str:
  """Returns a Markdown table of a policy: all tasks, then each task type."""
  columns = ['policy', 'tasks', 'episodes', 'success, 95 %', 'score', 'turns']
  rows = [
    [name, task_type, len(subset), *_cells(subset)]
    for task_type, subset in _by_type(trajectories).items()
  ]
  return plots.table([*columns, 'invalid', 'inadmissible'], rows)


def _cells(trajectories: Sequence[trajectory.Trajectory]) -> list[str]:
  values = metrics.summarize(trajectories, prefix='')
  low, high = success_interval(trajectories)

  def cell(key: str, form: str) -> str:
    return form.format(values[f'/{key}']) if f'/{key}' in values else ''

  return [
    f'{cell("success_rate", "{:.1%}")} [{low:.1%}, {high:.1%}]',
    cell('score', '{:.3f}'),
    cell('episode_length', '{:.1f}'),
    cell('invalid_action_rate', '{:.1%}'),
    cell('inadmissible_action_rate', '{:.1%}'),
  ]


def _by_type(
  trajectories: Sequence[trajectory.Trajectory],
) -> dict[str, list[trajectory.Trajectory]]:
  """Returns all episodes as 'all', then those of each of several types."""
  task_types = sorted({t.task_type for t in trajectories})
  groups = {'all': list(trajectories)}
  if len(task_types) > 1:
    for task_type in task_types:
      name = "'all'" if task_type == 'all' else task_type
      groups[name] = [t for t in trajectories if t.task_type == task_type]
  return groups


def draw(
  policies: dict[str, Sequence[trajectory.Trajectory]], path: pathlib.Path
) -> None:
  """Draws success rates with intervals by task type.

  Args:
    policies: episodes by name of the policy.
    path: path of the image.
  """
  everything = [t for episodes in policies.values() for t in episodes]
  shown = {
    task_type: len({t.task for t in subset})
    for task_type, subset in _by_type(everything).items()
  }
  width = 0.8 / len(policies)
  with plots.image(path, figsize=(max(5, 2 + 1.3 * len(shown)), 4.5)) as (
    figure,
    axes,
  ):
    for n, (name, episodes) in enumerate(policies.items()):
      bars = _draw_bars(axes, episodes, list(shown), n * width, width)
      bars.set_label(
        name if len(name) <= _MAX_LABEL else f'…{name[-_MAX_LABEL:]}'
      )
    axes.set_xticks(
      [k + width * (len(policies) - 1) / 2 for k in range(len(shown))],
      [f'{task_type} ({count})' for task_type, count in shown.items()],
      rotation=25 if len(shown) > 1 else 0,
      ha='right' if len(shown) > 1 else 'center',
      rotation_mode='anchor',
    )
    axes.set_yticks(range(0, 101, 20))
    # Leave room above 100 for the labels of the bars.
    axes.set(
      xlabel='task type (number of tasks)',
      ylabel='success (%), 95 % interval',
      ylim=(0, 110),
    )
    axes.grid(alpha=0.3, axis='y')
    axes.set_axisbelow(True)
    # Outside of the axes, so that the legend never covers a bar.
    figure.legend(loc='outside upper center')


def _draw_bars(
  axes: Any,
  episodes: Sequence[trajectory.Trajectory],
  task_types: Sequence[str],
  offset: float,
  width: float,
) -> Any:
  """Draws a bar of the success rate per task type; returns the bars."""
  xs, heights, error_bars = [], [], []
  for k, task_type in enumerate(task_types):
    subset = [t for t in episodes if task_type in ('all', t.task_type)]
    if not subset:
      continue
    mean, (low, high) = (
      np.mean([t.success for t in subset]),
      success_interval(subset),
    )
    xs.append(k + offset)
    heights.append(100 * mean)
    error_bars.append((100 * max(0, mean - low), 100 * max(0, high - mean)))
  bars = axes.bar(xs, heights, width, yerr=np.array(error_bars).T, capsize=3)
  axes.bar_label(bars, fmt='{:.0f}', padding=2, fontsize=8)
  return bars


def main(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  models: Sequence[str] = (),
  checkpoints: Sequence[str] = (),
  export: str = '',
) -> None:
  """Evaluates policies on the evaluation tasks of a config.

  Prints a table and compares the first policy with each of the others;
  checkpoints come before models. Writes evaluation.json, with the outcome of
  every episode, and evaluation.png. With `episodes.every`, the episodes of
  policy N, from 0, are kept in evaluation/N, a folder for the viewer. All three
  of an earlier evaluation are moved to evaluation.bak.

  Args:
    config: the experiment.
    workdir: folder to write to.
    models: Hugging Face folders or names on the hub.
    checkpoints: work directories, of which the newest checkpoint is used, or
      single checkpoints, WORKDIR/checkpoints/ITERATION.
    export: folder to which the only checkpoint is written as Hugging Face
      files, `policy/`; '' for none.

  Raises:
    ValueError: one line per problem, if the config is invalid.
  """
  policy_files.check_export(export, checkpoints)
  policies = _check_policies(config, models, checkpoints)
  run_config.check_workdir(workdir)
  if export:
    run_config.check_workdir(export, '--export')
  distributed.initialize()
  exported = ('checkpoint', *checkpoints) if export else ()
  played: dict = dict.fromkeys(policies)  # In their order.
  write_policy = None
  with builders.make_pool(config) as pool:
    trial.try_environment(config, pool, config.evaluation.split)
    # The policy to export comes last, because it stays in memory.
    for item in sorted(policies, key=lambda item: item == exported):
      *played[item], write_policy = _evaluate_policy(
        config, *item, pool, keep=item == exported
      )
  episodes = {path: own for (_, path), (own, _) in played.items()}
  texts = [text for _, text in played.values()]
  is_main = distributed.is_main_process()
  comparisons = _compare_first(episodes) if is_main else {}
  notes: list[str] = []
  try:
    # Before the tables, which nothing may read any more.
    if is_main:
      folder = pathlib.Path(workdir)
      for note in _save(config, folder, episodes, texts, comparisons):
        notes.append(note)
    if write_policy:
      write_policy(export)
  finally:
    if is_main:
      _print(episodes, comparisons, notes)


def _compare_first(
  episodes: Mapping[str, Sequence[trajectory.Trajectory]],
) -> dict[str, dict[str, Comparison]]:
  """Returns how the first policy compares with each of the others."""
  first, *others = episodes
  return {name: compare(episodes[first], episodes[name]) for name in others}


def _save(
  config: ml_collections.ConfigDict,
  folder: pathlib.Path,
  episodes: Mapping[str, Sequence[trajectory.Trajectory]],
  texts: Sequence[tokenizer.Tokenizer],
  comparisons: Mapping[str, Mapping[str, Comparison]],
) -> Iterator[str]:
  """Writes the episodes of policies to a folder; yields lines that name files.

  All at once, because another evaluation may write to the same folder.
  """
  with errors.explain_disk_errors(str(folder)):
    yield from _move_earlier(folder)
    yield from _write(config, folder, episodes, comparisons)
    if config.episodes.every:
      for n, (own, text) in enumerate(
        zip(episodes.values(), texts, strict=True)
      ):
        yield from _keep_episodes(folder / _KEPT / str(n), text, own, config)


def _print(
  episodes: Mapping[str, Sequence[trajectory.Trajectory]],
  comparisons: Mapping[str, Mapping[str, Comparison]],
  notes: Sequence[str],
) -> None:
  """Prints tables and comparisons of policies, and notes."""
  first = next(iter(episodes))
  tables = [table(name, own) for name, own in episodes.items()]
  differences = [
    f'{first} minus {name}, {measure}: {comparison}'
    for name, measures in comparisons.items()
    for measure, comparison in measures.items()
  ]
  print('\n\n'.join((*tables, *differences, '\n'.join(notes))))


def _check_policies(
  config: ml_collections.ConfigDict,
  models: Sequence[str],
  checkpoints: Sequence[str],
) -> list[tuple[str, str]]:
  """Returns ('checkpoint' or 'model', path) of each policy to evaluate.

  Raises:
    ValueError: one line per problem, if one of them cannot be evaluated.
  """
  policies = [('checkpoint', c) for c in checkpoints]
  policies += [('model', m) for m in models]
  policies = list(dict.fromkeys(policies))
  if not policies:
    raise ValueError(
      '--model, --checkpoint: missing; name the policy to evaluate, such as '
      '--checkpoint=RUN or --model=RUN/policy'
      + (f' or --model={config.model.path}' if config.model.path else '')
    )
  if config.evaluation.split is None:
    raise ValueError(
      'evaluation.split=None: not set; must be a split of the tasks'
    )
  for source, path in policies:
    if source == 'checkpoint':
      saved_checkpoint.check(path)
      saved_checkpoint.compare(config, path)
    config_lib.validate(
      _with_policy(config, source, path),
      trains=source == 'checkpoint',
      collects=False,
      evaluates=True,
    )
  return policies


def _write(
  config: ml_collections.ConfigDict,
  folder: pathlib.Path,
  episodes_by_policy: Mapping[str, Sequence[trajectory.Trajectory]],
  comparisons: Mapping[str, Mapping[str, Comparison]],
) -> list[str]:
  """Writes the results; returns lines that name their files."""
  folder.mkdir(parents=True, exist_ok=True)
  report = {
    'version': files.VERSION,
    'config': run_config.experiment(config),
    'policies': {
      name: {
        'rates': summarize(episodes),
        'iterations': policy_files.iterations(pathlib.Path(name)),
        'episodes': [_record(t) for t in episodes],
      }
      for name, episodes in episodes_by_policy.items()
    },
    'comparisons': {
      name: {measure: dataclasses.asdict(c) for measure, c in measures.items()}
      for name, measures in comparisons.items()
    },
  }
  files.write_atomic(folder / _REPORT, json.dumps(report, indent=1) + '\n')
  draw(episodes_by_policy, folder / _PLOT)
  return [f'{folder}/{_REPORT}, {folder}/{_PLOT}']


def _move_earlier(folder: pathlib.Path) -> list[str]:
  """Moves the results of an earlier evaluation, if any, to evaluation.bak.

  Args:
    folder: folder of the results.

  Returns:
    Lines that name the new folder.
  """
  paths = [folder / name for name in (_REPORT, _PLOT, _KEPT)]
  earlier = [path for path in paths if path.exists()]
  if not earlier:
    return []
  backup = files.free_name(folder / _KEPT)
  backup.mkdir()
  for path in earlier:
    path.rename(backup / path.name)
  return [f'the earlier evaluation is kept in {backup}']


def _keep_episodes(
  folder: pathlib.Path,
  text: tokenizer.Tokenizer,
  episodes: Sequence[trajectory.Trajectory],
  config: ml_collections.ConfigDict,
) -> list[str]:
  """Writes the episodes of a policy for the viewer; returns a line on that."""
  # tensorflow_datasets is slow to import.
  from gigpo_jax import episodes as episodes_lib

  episodes_lib.write(
    folder / episodes_lib.FOLDER, text, {0: episodes}, seed=config.seed
  )
  return [f'to see its episodes: python launch/view.py --workdir={folder}']


def _with_policy(
  config: ml_collections.ConfigDict, source: str, path: str
) -> ml_collections.ConfigDict:
  """Returns the config for a policy; sets the path of a model."""
  config = config.copy_and_resolve_references()
  if source == 'model':
    config.model.path = path
  return config


def _evaluate_policy(
  config: ml_collections.ConfigDict,
  source: str,
  path: str,
  pool: env_pool.EnvPool,
  *,
  keep: bool,
) -> tuple[
  list[trajectory.Trajectory], tokenizer.Tokenizer, Callable[[str], None] | None
]:
  """Returns the episodes of a policy, its tokenizer, and what exports it.

  The last is None, and the policy is dropped, if it is not to be kept.
  """
  config = _with_policy(config, source, path)
  console.log(f'policy: --{source}={path}')
  bundle = model_builders.make_model_bundle(config)
  with jax.set_mesh(bundle.mesh):
    if source == 'checkpoint':
      params, base_params = saved_checkpoint.restore(config, bundle, path)
    else:
      params, base_params = bundle.load(), None
    bundle.compile_together(params, base_params)
    (episodes,) = builders.make_runner(config, bundle, pool).run_batches(
      params,
      [builders.make_eval_batch(config)],
      base_params=base_params,
      label='evaluation',
    )
    metrics.stop_if_failed(episodes, config.pool.max_failed_share)

  def export(folder: str) -> None:
    with jax.set_mesh(bundle.mesh), errors.explain_disk_errors(folder):
      start, path = config.model.path, pathlib.Path(folder)
      policy_files.export(path, bundle, base_params, params, start)
    console.log(f'exported to {folder}/policy')

  return episodes, bundle.tokenizer, export if keep else None


def _record(t: trajectory.Trajectory) -> dict:
  return {
    'task': str(t.task),
    'kind': t.task_type,
    'repeat': t.member,
    'success': t.success,
    'score': t.score,
    'turns': len(t.steps),
    'invalid': sum(not step.result.valid for step in t.steps),
    'failure': t.failure,
  }
