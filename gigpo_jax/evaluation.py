"""Held-out panels: every task once or more, rates with 95 % intervals.

A panel is fixed (the first tasks of a split) and so are its random streams, so
two policies are compared on the same tasks and the same noise.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import jax
import ml_collections
import numpy as np

from envs import base
from gigpo_jax import (
  checkpoint,
  experiment,
  hosts,
  metrics,
  rollout,
  sampler,
  trajectory,
)
from gigpo_jax import (
  config as config_lib,
)

_RESAMPLES = 10_000
_MAX_LABEL = 60  # characters of a policy's name in a picture


def play(
  roller: rollout.Roller,
  params: dict,
  panel: list[base.Task],
  *,
  sampling: sampler.Sampling,
  kind: Callable[[base.Task], str],
  repeats: int = 1,
) -> list[trajectory.Trajectory]:
  """Returns the episodes of a policy on a panel, task by task."""
  total = repeats * len(hosts.share(len(panel)))
  with hosts.bar(total=total, desc='evaluation', unit='episode') as bar:
    return roller.collect(
      params,
      panel,
      episodes_per_group=repeats,
      stream=(rollout.EVALUATION, 0),
      sampling=sampling,
      kind=kind,
      on_finished=hosts.advance(
        bar, lambda: roller.sampler.stats.decode_tokens
      ),
    )


def rates(
  trajectories: Sequence[trajectory.Trajectory],
) -> dict[str, float]:
  """Returns success and lengths of episodes, names 'eval/...'.

  A task whose environment broke off counts as failed, and is counted beside.
  """
  low, high = interval(trajectories)
  found = metrics.summarize(trajectories, prefix='eval') | {
    'eval/success_low': low,
    'eval/success_high': high,
    'eval/episodes': float(len(trajectories)),
  }
  if 'eval/score' in found:
    low, high = _resampled(
      [np.mean(scores) for scores in _by_task(trajectories, _score).values()]
    )
    found |= {'eval/score_low': low, 'eval/score_high': high}
  return found


def interval(
  trajectories: Sequence[trajectory.Trajectory],
) -> tuple[float, float]:
  """Returns a 95 % interval of the success rate.

  Wilson's where each task was played once, or all tasks went the same; else by
  drawing tasks anew, for episodes of a task are not independent.
  """
  shares = [np.mean(found) for found in _by_task(trajectories).values()]
  if len(shares) == len(trajectories) or min(shares) == max(shares):
    return metrics.wilson(round(sum(shares)), len(shares))
  return _resampled(shares)


def _success(t: trajectory.Trajectory) -> float:
  return float(t.success)


def _score(t: trajectory.Trajectory) -> float:
  return t.score or 0.0


def _by_task(
  trajectories: Sequence[trajectory.Trajectory],
  value: Callable[[trajectory.Trajectory], float] = _success,
) -> dict[base.Task, list[float]]:
  found: dict[base.Task, list[float]] = {}
  for t in trajectories:
    found.setdefault(t.task, []).append(value(t))
  return found


def _resampled(values: Sequence[float]) -> tuple[float, float]:
  """Returns a 95 % bootstrap interval of a mean (percentiles, seed 0)."""
  values = np.asarray(values, float)
  rng = np.random.default_rng(0)
  means = [
    values[rng.integers(len(values), size=len(values))].mean()
    for _ in range(_RESAMPLES)
  ]
  low, high = np.percentile(means, [2.5, 97.5])
  return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Two policies on the same tasks.

  Attributes:
    difference: of their means, the first less the second.
    low: end of its 95 % interval, by drawing tasks anew.
    high: the other end.
    better: tasks on which the first did better.
    worse: the second.
    p: of as uneven a split of these tasks, if both were alike (sign test).
  """

  difference: float
  low: float
  high: float
  better: int
  worse: int
  p: float


def compare(
  one: Sequence[trajectory.Trajectory],
  other: Sequence[trajectory.Trajectory],
) -> dict[str, Comparison]:
  """Compares two policies' episodes task by task.

  Returns:
    Of the success rate and, where the environment tells it, of the score.

  Raises:
    ValueError: if they are not of the same tasks.
  """
  measures = {'success': _success}
  if any(t.score is not None for t in (*one, *other)):
    measures['score'] = _score
  return {
    name: _compared(_by_task(one, value), _by_task(other, value))
    for name, value in measures.items()
  }


def _compared(
  first: dict[base.Task, list[float]], second: dict[base.Task, list[float]]
) -> Comparison:
  if first.keys() != second.keys():
    raise ValueError('other: is of other tasks; must be of the same panel')
  gaps = np.array(
    [np.mean(first[task]) - np.mean(second[task]) for task in first]
  )
  better, worse = int((gaps > 0).sum()), int((gaps < 0).sum())
  if better or worse:
    low, high = _resampled(gaps)
  else:
    # Tasks drawn anew would all be alike, too: as sure as they are many.
    high = metrics.wilson(0, len(gaps))[1]
    low = -high
  return Comparison(
    float(gaps.mean()), low, high, better, worse, sign_test(better, worse)
  )


def sign_test(better: int, worse: int) -> float:
  """Returns the chance that fair coins fall as unevenly, two-sided."""
  number = better + worse
  tail = sum(math.comb(number, k) for k in range(min(better, worse) + 1))
  return min(1.0, 2 * tail / 2**number)


def table(name: str, trajectories: Sequence[trajectory.Trajectory]) -> str:
  """Returns a Markdown table of a policy: all tasks, and each type's."""
  head = '| policy | tasks | episodes | success, 95 % | score | turns | '
  lines = [
    head + 'invalid | inadmissible |',
    '|---|---|---|---|---|---|---|---|',
  ]
  kinds = sorted({t.kind for t in trajectories})
  for kind in ('all', *(kinds if len(kinds) > 1 else ())):
    part = [t for t in trajectories if kind in ('all', t.kind)]
    found = metrics.summarize(part, prefix='')
    low, high = interval(part)

    def told(key: str, form: str, found: dict = found) -> str:
      return form.format(found[f'/{key}']) if f'/{key}' in found else ''

    lines.append(
      f'| {name} | {kind} | {len(part)} '
      f'| {told("success_rate", "{:.1%}")} [{low:.1%}, {high:.1%}] '
      f'| {told("score", "{:.3f}")} | {told("episode_length", "{:.1f}")} '
      f'| {told("invalid_action_rate", "{:.1%}")} '
      f'| {told("inadmissible_action_rate", "{:.1%}")} |'
    )
  return '\n'.join(lines)


def draw(
  policies: dict[str, Sequence[trajectory.Trajectory]], path: pathlib.Path
) -> None:
  """Writes a picture: success by type of task, with intervals."""
  # Slow to import.
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  kinds = sorted({t.kind for found in policies.values() for t in found})
  shown = ['all', *kinds] if len(kinds) > 1 else ['all']
  figure, axes = pyplot.subplots(
    figsize=(max(5, 2 + 1.3 * len(shown)), 4.5), layout='constrained'
  )
  width = 0.8 / len(policies)
  for n, (name, found) in enumerate(policies.items()):
    places, heights, errors = [], [], []
    for k, kind in enumerate(shown):
      part = [t for t in found if kind in ('all', t.kind)]
      if not part:
        continue
      mean, (low, high) = np.mean([t.success for t in part]), interval(part)
      places.append(k + n * width)
      heights.append(100 * mean)
      errors.append((100 * max(0, mean - low), 100 * max(0, high - mean)))
    bars = axes.bar(
      places,
      heights,
      width,
      yerr=np.array(errors).T,
      capsize=3,
      label=name if len(name) <= _MAX_LABEL else f'…{name[-_MAX_LABEL:]}',
    )
    axes.bar_label(bars, fmt='{:.0f}', padding=2, fontsize=8)
  tasks = {kind: set() for kind in shown}
  for t in (t for found in policies.values() for t in found):
    for kind in {'all', t.kind} & tasks.keys():
      tasks[kind].add(t.task)
  axes.set_xticks(
    [k + width * (len(policies) - 1) / 2 for k in range(len(shown))],
    [f'{kind} ({len(tasks[kind])})' for kind in shown],
    rotation=25 if len(shown) > 1 else 0,
    ha='right' if len(shown) > 1 else 'center',
    rotation_mode='anchor',
  )
  axes.set_yticks(range(0, 101, 20))
  # Above 100, room for the numbers of the bars.
  axes.set(
    xlabel='task type (number of tasks)',
    ylabel='success (%), 95 % interval',
    ylim=(0, 110),
  )
  axes.grid(alpha=0.3, axis='y')
  axes.set_axisbelow(True)
  # Beside the bars, which may be anywhere.
  figure.legend(loc='outside upper center')
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def main(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  models: Sequence[str] = (),
  checkpoints: Sequence[str] = (),
  repeats: int = 1,
) -> None:
  """Evaluates policies on the config's panel.

  Prints a table, and how the first compares with each of the others,
  checkpoints before models; writes evaluation.json, with every episode, and
  evaluation.png into the folder.

  Args:
    config: the experiment.
    workdir: where to write.
    models: Hugging Face folders or names on the hub.
    checkpoints: work directories of runs, of which the newest is taken, or
      checkpoints, WORKDIR/checkpoints/ITERATION.
    repeats: episodes of a task.

  Raises:
    ValueError: in one line a problem, if the config cannot work.
  """
  if repeats < 1:
    raise ValueError(f'--repeats={repeats}: must be at least 1')
  named = [('checkpoint', c) for c in checkpoints]
  named += [('model', m) for m in models]
  if not named:
    raise ValueError(
      '--model, --checkpoint: missing; name the policy to evaluate, such as '
      '--checkpoint=RUN or --model=RUN/policy'
      + (f' or --model={config.model.path}' if config.model.path else '')
    )
  for kind, path in named:
    if kind == 'checkpoint':
      _check_checkpoint(path)
    config_lib.validate(_with(config, kind, path), trains=kind == 'checkpoint')
  config_lib.check_workdir(workdir)
  hosts.join()
  found = {}
  with experiment.make_pool(config) as pool:
    experiment.try_environment(config, pool, config.evaluation.split)
    for kind, path in named:
      found[path] = _play_one(config, kind, path, pool, repeats)
  if not hosts.first():
    return
  names = list(found)
  print('\n\n'.join(table(name, found[name]) for name in names))
  compared = {name: compare(found[names[0]], found[name]) for name in names[1:]}
  for name, measured in compared.items():
    for what, c in measured.items():
      print(
        f'\n{names[0]} less {name}, {what}: {100 * c.difference:+.1f} points '
        f'[{100 * c.low:+.1f}, {100 * c.high:+.1f}], better on {c.better} and '
        f'worse on {c.worse} tasks, p = {c.p:.2g}'
      )
  with experiment.disk(workdir):
    _write(pathlib.Path(workdir), found, compared)


def _write(
  folder: pathlib.Path,
  found: dict[str, list[trajectory.Trajectory]],
  compared: dict[str, dict[str, Comparison]],
) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  told = {
    'policies': {
      name: {
        'rates': rates(episodes),
        'episodes': [_record(t) for t in episodes],
      }
      for name, episodes in found.items()
    },
    'comparisons': {
      name: {what: dataclasses.asdict(c) for what, c in measured.items()}
      for name, measured in compared.items()
    },
  }
  (folder / 'evaluation.json').write_text(json.dumps(told, indent=1) + '\n')
  draw(found, folder / 'evaluation.png')
  print(f'\n{folder}/evaluation.json, {folder}/evaluation.png')


def _with(
  config: ml_collections.ConfigDict, kind: str, path: str
) -> ml_collections.ConfigDict:
  """Returns the config of a policy; a checkpoint's has the config's model."""
  config = config.copy_and_resolve_references()
  if kind == 'model':
    config.model.path = path
  return config


def _play_one(config, kind: str, path: str, pool, repeats: int) -> list:
  config = _with(config, kind, path)
  hosts.say(f'policy: --{kind}={path}')
  policy = experiment.make_policy(config)
  with jax.set_mesh(policy.mesh):
    params = policy.load()
    if kind == 'checkpoint':
      params = _restored(config, policy, params, path)
    return play(
      experiment.make_roller(config, policy, pool),
      params,
      experiment.make_panel(config),
      sampling=experiment.make_sampling(config, evaluation=True),
      kind=experiment.make_kind(config),
      repeats=repeats,
    )


def _place(path: str) -> tuple[pathlib.Path, int | None]:
  """Returns a run's folder of checkpoints, and which one, if that is told."""
  given = pathlib.Path(path)
  if given.parent.name == 'checkpoints' and given.name.isdecimal():
    return given.parent, int(given.name)
  return given / 'checkpoints', None


def _check_checkpoint(path: str) -> None:
  folder, iteration = _place(path)
  if iteration is not None:
    if not (folder / str(iteration)).is_dir():
      raise ValueError(f'--checkpoint={path}: not there; must be a checkpoint')
    if wrong := checkpoint.damage(folder / str(iteration)):
      raise ValueError(
        f'--checkpoint={path}: damaged ({wrong}); must be a whole one'
      )
  elif not checkpoint.check_folder(folder):
    raise ValueError(
      f'--checkpoint={path}: no checkpoints/ there; must be the --workdir of '
      'a run, or WORKDIR/checkpoints/ITERATION'
    )


def _restored(config, policy, start: dict, path: str) -> dict:
  """Returns the parameters of a checkpoint."""
  learner = experiment.make_learner(
    config, policy, experiment.policy_gradient(config)
  )
  like = {'policy': checkpoint.abstract(learner.init(start))}
  policy.sampler.base = learner.base
  folder, iteration = _place(path)
  with checkpoint.Checkpointer(folder, read_only=True) as checkpointer:
    iteration, states, _ = checkpointer.restore(
      like, iteration=iteration, partial=True
    )
  hosts.say(f'policy after iteration {iteration}')
  return states['policy'].params


def _record(t: trajectory.Trajectory) -> dict:
  return {
    'task': str(t.task),
    'kind': t.kind,
    'repeat': t.member,
    'success': t.success,
    'score': t.score,
    'turns': len(t.steps),
    'invalid': sum(not step.result.valid for step in t.steps),
    'failure': t.failure,
  }
