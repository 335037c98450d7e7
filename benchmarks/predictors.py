"""Measure what predicts the effect of step advantages, per config.

    python benchmarks/predictors.py --config=configs/keydoor.py:mini \
        --config=configs/alfworld.py:mini --set rollout.groups=128
    python benchmarks/predictors.py --config=configs/alfworld.py:mini \
        --expert_noise=0.5
    python benchmarks/predictors.py --sweep=configs/sweeps/keydoor.py \
        --output=runs/dial.json

Plays groups of training episodes with each config's warm start, or with the
environment's expert, whose actions are replaced by random ones with a given
probability. Prints one row of a Markdown table per config:

- `success`: successful episodes, with a 95 % interval over groups;
- `steps`: mean number of steps of an episode;
- `revisits`: steps in a state that their episode has visited before;
- `singletons`: steps whose anchor group has no other step;
- `correlation`: of the episode advantage A_E and the step advantage A_S, over
  steps;
- `zero variance`: groups whose episodes all got the same reward.

The expert needs no weights, so its figures compare environments, such as
generated games with official ones, under the same behaviour.

`--sweep` adds the settings of a sweep's GiGPO runs. `--output` adds the metrics
by setting to a JSON file, for `python -m gigpo_jax.tools.law`.
"""

import argparse
import ast
import json
import pathlib
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np
from jaxtyping import Bool

import envs
from envs import base
from gigpo_jax import advantages, batch, builders, metrics, rollout, trajectory
from gigpo_jax import config as config_lib
from gigpo_jax.run import model_builders
from gigpo_jax.tools import law, plots, sweep_runs

COLUMNS = (
  *('setting', 'episodes', 'success, 95 %', 'steps', 'revisits', 'singletons'),
  *('correlation', 'zero variance'),
)


def find_runs(
  names: Sequence[str], sweep_file: str | None, settings: Sequence[str]
) -> dict[str, sweep_runs.Run]:
  """Returns what to measure by setting: configs, and settings of a sweep.

  Args:
    names: values of --config.
    sweep_file: value of --sweep.
    settings: changed fields, as FIELD=VALUE.
  """
  changes = _parse(settings)
  seed = changes.pop('seed', 0)
  runs = {}
  for name in names:
    runs[law.setting_of_config(name)] = sweep_runs.Run(
      '', name, seed, tuple(changes.items())
    )
  for run in sweep_runs.read(sweep_file) if sweep_file else ():
    setting, method = law.split_name(run.experiment, run.name)
    if method == 'gigpo':
      fields = dict(run.overrides) | changes
      runs.setdefault(
        setting, sweep_runs.Run('', run.config, seed, tuple(fields.items()))
      )
  return runs


def _parse(settings: Sequence[str]) -> dict[str, object]:
  """Returns fields that are given as FIELD=VALUE."""
  overrides = {'rollout.groups': 64}
  for setting in settings:
    field, _, value = setting.partition('=')
    try:
      overrides[field] = ast.literal_eval(value)
    except (SyntaxError, ValueError):
      overrides[field] = value
  return overrides


def play_policy(
  config: ml_collections.ConfigDict, tasks: Sequence[base.Task]
) -> list[trajectory.Trajectory]:
  """Plays a group of each task with the config's policy."""
  config_lib.validate(config)
  policy = model_builders.make_model_bundle(config)
  with jax.set_mesh(policy.mesh), builders.make_pool(config) as pool:
    return builders.make_runner(config, policy, pool).run(
      policy.load(),
      tasks,
      episodes_per_group=config.rollout.episodes_per_group,
      stream=(rollout.TRAIN, 0),
      sampling=model_builders.make_sampling(config),
    )


def play_expert(
  config: ml_collections.ConfigDict, tasks: Sequence[base.Task], noise: float
) -> list[trajectory.Trajectory]:
  """Plays a group of each task with the environment's expert."""
  name, kwargs = config.env.name, config_lib.env_kwargs(config)
  expert, env = (envs.make(name, **kwargs) for _ in range(2))
  size = config.rollout.episodes_per_group
  task_type = builders.make_task_type(config)
  episodes = []
  for group, task in enumerate(tasks):
    for member in range(size):
      seed = (config.seed * len(tasks) + group) * size + member
      pairs = envs.demonstrate(name, expert, task, noise=noise, seed=seed)
      steps = _replay(env, task, [response for _, response in pairs])
      episodes.append(
        trajectory.Trajectory(task, task_type(task), group, member, steps)
      )
  return episodes


def _replay(
  env: base.Env, task: base.Task, responses: Sequence[str]
) -> tuple[trajectory.Step, ...]:
  """Returns the steps of an episode with given responses, without tokens."""
  observation, steps = env.reset(task), []
  for response in responses:
    result = env.step(response)
    steps.append(trajectory.Step.without_tokens(observation, response, result))
    observation = result.observation
  return tuple(steps)


def measure(
  config: ml_collections.ConfigDict, episodes: list[trajectory.Trajectory]
) -> dict[str, float]:
  """Returns the predictors, as metrics of the names that runs write."""
  algorithm = config.algorithm
  rows = batch.from_trajectories(
    episodes, **builders.rows_kwargs(config) | {'row_multiple': 256}
  )
  return metrics.summarize(episodes) | advantages.diagnose(
    *rows.steps_taken(),
    discount=algorithm.discount,
    invalid_penalty=algorithm.invalid_penalty,
    norm=algorithm.norm,
  )


def table_row(
  name: str, episodes: list[trajectory.Trajectory], values: dict[str, float]
) -> list[str]:
  """Returns the cells of a config's row."""
  groups: dict[int, list[bool]] = {}
  for episode in episodes:
    groups.setdefault(episode.group, []).append(episode.success)
  successes = np.array(list(groups.values()))
  low, high = success_interval(successes)
  return [
    name,
    str(len(episodes)),
    f'{successes.mean():.1%} [{low:.1%}, {high:.1%}]',
    *law.predictor_cells(values)[1:],
    f'{values["advantage/zero_variance_groups"]:.1%}',
  ]


def success_interval(
  successes: Bool[np.ndarray, 'G M'],
) -> tuple[float, float]:
  """Returns a 95 % interval of the mean success, over groups.

  It is Wilson's interval for the effective number of episodes: for as many
  independent ones as give the variance of the mean that the groups show. This
  is at least G, at which episodes of a group are copies, and at most G M.

  Args:
    successes: successes of the M episodes of each of at least two groups.
  """
  groups, size = successes.shape
  mean = successes.mean()
  variance = successes.mean(axis=1).var(ddof=1) / groups
  independent = mean * (1 - mean) / max(variance, 1e-12)
  independent = float(np.clip(independent, groups, groups * size))
  return metrics.wilson(float(mean) * independent, independent)


def save(path: pathlib.Path, measured: dict[str, dict[str, float]]) -> None:
  """Writes metrics by setting; other settings of an earlier file stay."""
  known = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(known | measured, indent=2) + '\n')


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--config', action='append', default=[])
  parser.add_argument('--sweep', help='file of a sweep')
  parser.add_argument('--output', help='JSON file for the metrics')
  parser.add_argument(
    '--set', action='append', default=[], metavar='FIELD=VALUE',
    help='a field of all configs; rollout.groups=64 by default',
  )  # fmt: skip
  parser.add_argument('--expert_noise', type=float)
  options = parser.parse_args()
  if options.output and not pathlib.Path(options.output).parent.is_dir():
    parser.error(f'--output={options.output}: no such folder')
  runs = find_runs(options.config, options.sweep, options.set)
  cells, measured = [], {}
  for name, run in runs.items():
    config = run.load()
    tasks = builders.make_task_sampler(config).at(0)
    if options.expert_noise is None:
      episodes = play_policy(config, tasks)
    else:
      episodes = play_expert(config, tasks, options.expert_noise)
    measured[name] = measure(config, episodes)
    cells.append(table_row(name, episodes, measured[name]))
  if options.output:
    save(pathlib.Path(options.output), measured)
  print(plots.table(list(COLUMNS), cells))


if __name__ == '__main__':
  main()
