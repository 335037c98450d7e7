r"""Cosine between the advantages of algorithms and those of an oracle.

    python benchmarks/credit.py --config=configs/alfworld.py:mini
    python benchmarks/credit.py --config=configs/webshop.py:mini --num_groups=8

With the values of a critic, also for PPO. The checkpoint is one of the warm-up,
in which a run trains its critic only:

    python launch/train.py --config=configs/alfworld.py:mini,ppo \
        --workdir=runs/critic --config.critic.warmup_iterations=55
    python benchmarks/credit.py --config=configs/alfworld.py:mini \
        --critic=runs/critic/checkpoints/54

Plays groups of episodes with a policy, by default the config's warm start, and
`--continuations` further episodes from each state, whose mean return is the
value V of the state. The oracle's advantage of a step is r + V(s') - V(s),
without a discount and with V = 0 after the last step: VinePPO with many
continuations.

Prints, for each algorithm and for controls, the cosine of its advantages with
the oracle's over all steps, unweighted, and the difference of this cosine from
GiGPO's. Intervals are 95 % bootstrap intervals over groups, paired for the
difference. They cover neither other seeds of the run nor other policies.

The noise of the oracle lowers every cosine by the same factor. `halves` is the
cosine h between two oracles with half of the continuations each. From it follow
the estimated cosines with exact values: of the oracle, sqrt(2 h / (1 + h)), the
`ceiling`; of VinePPO with half of the continuations, sqrt(h); and of a method,
its cosine divided by the ceiling, in the column `exact`.

`--summary=docs/results/oracle.json` stores the table for the plot of
`python -m gigpo_jax.tools.results`.

More groups need more environments at once, which keep the sampler busier: with
two groups, most slots of a batch are empty.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import flags

import envs
from configs import variants
from gigpo_jax import (
  algorithms,
  batch,
  builders,
  continuations,
  group_filter,
  rollout,
  row_stats,
)
from gigpo_jax import config as config_lib
from gigpo_jax.algorithms import vineppo
from gigpo_jax.run import config_fields, model_builders, saved_checkpoint
from gigpo_jax.runtime import files
from gigpo_jax.tools import law, plots
from launch import command, interrupt

_RESAMPLES = 2000


@interrupt.handle()
def main() -> None:
  """Parses the flags and prints the table."""
  groups = flags.DEFINE_integer('num_groups', 8, 'Groups to play.')
  count = flags.DEFINE_integer('continuations', 8, 'Continuations of a state.')
  output = flags.DEFINE_string('output', '', 'File for all advantages, *.npz.')
  critic = flags.DEFINE_string(
    'critic',
    '',
    'WORKDIR/checkpoints/ITERATION of a run of ppo, for the values of PPO.',
  )
  summary = flags.DEFINE_string(
    'summary',
    '',
    'JSON file for the cosines; it keeps those of other settings.',
  )

  def run(config, workdir: str) -> None:
    del workdir
    if groups.value < 2:
      raise ValueError(
        f'--num_groups={groups.value}: intervals are those over groups; must '
        'be at least 2'
      )
    config.rollout.groups = groups.value
    config_lib.validate(config)
    if count.value < 2 or count.value % 2:
      raise ValueError(
        f'--continuations={count.value}: two halves are compared; must be even '
        'and above 0'
      )
    check_files(output.value, summary.value)
    if critic.value:
      check_critic(config, critic.value)
    compared = measure(config, count.value, output.value, critic.value)
    if summary.value:
      name, variant = config.env.name, config.get('variant', '')
      setting = law.setting_of_config(f'{name}:{variant}')
      save(pathlib.Path(summary.value), setting, compared)

  command.run(run)


def measure(config, count: int, output: str = '', critic: str = '') -> dict:
  """Plays groups and continuations, prints the table and returns its figures.

  Args:
    config: the experiment; it plays `rollout.groups` groups.
    count: continuations of a state for the oracle.
    output: file for the advantages; '' for none.
    critic: checkpoint of a run with a critic; '' for none.
  """
  episodes, states, played = play(config, count)
  totals = oracle_returns(config, states, played)
  advantages, rows = {}, None
  for values in (totals, totals[:, ::2], totals[:, 1::2]):
    rows, expected = oracle_advantages(config, episodes, states, values)
    advantages[f'oracle {len(advantages)}'] = expected
  values = critic_values(config, critic, rows) if critic else None
  for label, (changed, algorithm) in make_methods(config, bool(critic)):
    advantages[label] = method_advantages(
      config, changed, algorithm, episodes, values
    )
  real = rows.real
  advantages = {label: values[real] for label, values in advantages.items()}
  if output:
    np.savez_compressed(output, groups=rows.groups[real], **advantages)
  report(config, episodes, states, played, count)
  compared = compare(rows.groups[real], advantages)
  print_table(compared)
  return compared


def make_methods(config, has_critic: bool) -> Iterator[tuple[str, tuple]]:
  """Yields (label, (config, algorithm)) of each method.

  Methods that need a critic are left out without one. VinePPO is left out,
  because it is the oracle with fewer continuations, and so are algorithms with
  branches, because these episodes have none, and algorithms that refuse the
  config.
  """
  controls = {
    'gigpo, episode_weight=0': {'episode_weight': 0.0},
    'gigpo, discount=1': {'discount': 1.0},
    'gigpo, anchor=shuffled': {'anchor': 'shuffled'},
    'gigpo, anchor=group': {'anchor': 'group'},
    'gigpo, anchor=state': {'anchor': 'state'},
    'g2po, anchor=shuffled': {'anchor': 'shuffled'},
    'g2po, anchor=group': {'anchor': 'group'},
  }
  for label in (*algorithms.REGISTRY, *controls):
    changed = config.copy_and_resolve_references()
    variants.use_algorithm(changed, label.partition(',')[0])
    # The episodes are those of `config`.
    changed.rollout.update(config.rollout)
    changed.env.update(config.env)
    changed.algorithm.update(controls.get(label, {}))
    algorithm = algorithms.of_section(changed.algorithm.to_dict())
    if not (
      (algorithm.needs_values and not has_critic)
      or algorithms.num_continuations(algorithm)
      or algorithms.branches(algorithm)
      or any(algorithms.conflicts(changed))
    ):
      yield label, (changed, algorithm)


def play(config, count: int) -> tuple:
  """Returns episodes, their states, and the continuations of the states."""
  bundle = model_builders.make_model_bundle(config)
  with jax.set_mesh(bundle.mesh), builders.make_pool(config) as pool:
    runner = builders.make_runner(config, bundle, pool)
    params = bundle.load()
    bundle.sampler.warm_up(params)
    groups = rollout.EpisodeBatch(
      builders.make_task_sampler(config).at(0),
      config.rollout.episodes_per_group,
      (rollout.TRAIN, 0),
      model_builders.make_sampling(config),
    )
    (episodes,) = runner.run_batches(params, [groups])
    states = continuations.find_states(episodes)
    (played,) = runner.run_batches(
      params,
      [continuations.make_batch(states, count, groups)],
      label='continuations',
    )
  return episodes, states, played


def oracle_returns(config, states, played):
  """Returns the undiscounted returns of continuations, [S, K]."""
  penalty = config.algorithm.invalid_penalty
  return continuations.returns(states, played, 1.0, penalty)


def oracle_advantages(config, episodes, states, totals) -> tuple:
  """Returns rows and their advantages by the mean of given returns."""
  values = continuations.mean_returns(totals)
  rows = make_rows(config, continuations.with_values(episodes, states, values))
  penalty = config.algorithm.invalid_penalty
  rewards = np.where(rows.valid, rows.rewards, rows.rewards - penalty)
  return rows, np.nan_to_num(vineppo.value_differences(rows, rewards, 1.0))


def make_rows(config, episodes):
  """Returns the rows of episodes, with the anchors of a config."""
  kwargs = builders.rows_kwargs(config)
  return batch.from_trajectories(episodes, **kwargs, seed=(config.seed, 0))


def critic_values(config, path: str, rows):
  """Returns the values of a checkpoint's critic before each token of rows."""
  bundle = model_builders.make_model_bundle(config)
  with jax.set_mesh(bundle.mesh):
    trained = builders.make_critic(config, bundle)
    params = saved_checkpoint.restore_params(
      path, {'critic': trained.abstract_state().params}
    )
    return trained.values(params['critic'], rows)


def method_advantages(config, changed, algorithm, episodes, values=None):
  """Returns each row's advantage by an algorithm; of one per token the mean.

  Args:
    config: the config with which the episodes were played.
    changed: the algorithm's config.
    algorithm: the algorithm.
    episodes: the episodes.
    values: those of a critic before each token, for algorithms that need them.
  """
  if config_lib.env_kwargs(changed) != config_lib.env_kwargs(config):
    episodes = with_anchors(changed, episodes)
  rows = make_rows(changed, episodes)
  advantages = algorithms.compute(algorithm, rows, values, {}).advantages
  if advantages.ndim == 1:
    return advantages
  return row_stats.token_means(advantages, rows.completion_mask)


def with_anchors(config, episodes) -> list:
  """Returns episodes with the anchors that a config's environment reports."""
  env = envs.make(config.env.name, **config_lib.env_kwargs(config))
  changed = []
  for episode in episodes:
    observation, steps = env.reset(episode.task), []
    for step in episode.steps:
      result = env.step(step.response)
      steps.append(
        dataclasses.replace(step, anchor=observation.anchor, result=result)
      )
      observation = result.observation
    changed.append(dataclasses.replace(episode, steps=tuple(steps)))
  env.close()
  return changed


def report(config, episodes, states, played, count: int) -> None:
  """Prints what was played, with the figures that explain the cosines."""
  rows = make_rows(config, episodes)
  default = algorithms.of_section(config.algorithm.to_dict())
  metrics = default.compute_advantages(rows).metrics
  cost = group_filter.SampleCounts.of(played)
  print(
    f'{config.env.name} {config.get("variant", "")}, {config.model.path}, '
    f'seed {config.seed}: {config.rollout.groups} groups of '
    f'{config.rollout.episodes_per_group} episodes, {rows.real.sum()} steps, '
    f'{len(states.starts)} states, {count} continuations each for the oracle; '
    f'{cost.env_steps:,} environment steps with replayed ones, '
    f'{cost.tokens:,} tokens; {sum(bool(t.failure) for t in played)} failed'
  )
  figures = {
    'success': np.mean([t.success for t in episodes]),
    'steps of an episode': np.mean([len(t.steps) for t in episodes]),
    'singleton rows': metrics.get('advantage/singleton_anchor_rows'),
    'correlation of A_E and A_S': metrics.get('advantage/correlation'),
  }
  print(', '.join(f'{k} {v:.3f}' for k, v in figures.items() if v is not None))


def group_products(groups, one, other):
  """Returns the sums (a b, a a, b b) over the rows of each group, [G, 3]."""
  products = np.stack([one * other, one * one, other * other], axis=1)
  sums = np.zeros((groups.max() + 1, 3))
  np.add.at(sums, groups, products.astype(np.float64))
  return sums


def cosine(sums):
  """Returns the cosine of summed products [..., 3]; 0 for a zero vector."""
  norms = np.sqrt(sums[..., 1] * sums[..., 2])
  return np.divide(
    sums[..., 0], norms, out=np.zeros_like(norms), where=norms > 0
  )


def find_ceiling(halves):
  """Returns the estimated cosine of an oracle with exact values.

  By the Spearman-Brown formula, two independent oracles of K continuations have
  the cosine 2 h / (1 + h), which is the square of that with exact values.

  Args:
    halves: h, the cosine of two oracles of K / 2 continuations each; NaN is
      returned where it is not above 0.
  """
  known = np.where(np.asarray(halves) > 0, halves, np.nan)
  return np.sqrt(2 * known / (1 + known))


def compare(groups, advantages: dict) -> dict:
  """Returns the cosines with the oracle, with bootstrap intervals.

  Args:
    groups: group of each row.
    advantages: advantages of each row by label; the labels of the oracle and of
      its halves start with `oracle`.

  Returns:
    `halves`, `ceiling`, and `methods`: by label, (value, low, high) of the
    cosine, of its difference from GiGPO's, and of the cosine with exact values.
  """
  oracle, *halves = [v for k, v in advantages.items() if k.startswith('oracle')]
  sums = group_products(groups, *halves)
  agreement = float(cosine(sums.sum(axis=0)))
  ceiling = float(find_ceiling(agreement))
  drawn = np.random.default_rng(0).integers(
    groups.max() + 1, size=(_RESAMPLES, groups.max() + 1)
  )
  ceilings = find_ceiling(cosine(sums[drawn].sum(axis=1)))
  cosines = {}
  for label, values in advantages.items():
    if not label.startswith('oracle'):
      sums = group_products(groups, values, oracle)
      cosines[label] = (
        float(cosine(sums.sum(axis=0))),
        cosine(sums[drawn].sum(axis=1)),
      )
  base, resampled = cosines['gigpo']
  methods = {
    label: {
      'cosine': (value, *_interval(samples)),
      'minus gigpo': (value - base, *_interval(samples - resampled)),
      'exact': (value / ceiling, *_interval(samples / ceilings)),
    }
    for label, (value, samples) in sorted(
      cosines.items(), key=lambda item: -item[1][0]
    )
  }
  return {'halves': agreement, 'ceiling': ceiling, 'methods': methods}


def print_table(compared: dict) -> None:
  """Prints the cosines that `compare` returns."""
  print(
    f'halves {compared["halves"]:.3f}; estimated cosines with exact values: '
    f'ceiling {compared["ceiling"]:.3f}, VinePPO with half of the '
    f'continuations {np.sqrt(max(compared["halves"], 0)):.3f}'
  )
  lines = []
  for label, cells in compared['methods'].items():
    digits = {'cosine': '.3f', 'minus gigpo': '+.3f', 'exact': '.2f'}
    texts = [
      f'{value:{digits[name]}} [{low:.2f}, {high:.2f}]'
      for name, (value, low, high) in cells.items()
    ]
    lines.append((label, *texts))
  print(plots.table(('method', 'cosine', 'minus gigpo', 'exact'), lines))


def check_files(output: str, summary: str) -> None:
  """Checks the files of results before the episodes are played.

  Raises:
    ValueError: in one line, if one has no folder, or the summary is another
      file.
  """
  for flag, path in (('output', output), ('summary', summary)):
    if not pathlib.Path(path).parent.is_dir():
      raise ValueError(f'--{flag}={path}: no such folder')
  if pathlib.Path(summary).is_file():
    files.read_object(pathlib.Path(summary))


def check_critic(config, path: str) -> None:
  """Checks a checkpoint with a critic before the episodes are played.

  Raises:
    ValueError: in one line, if it has no critic, another model, or a policy
      that has been trained.
  """
  saved_checkpoint.check(path, flag='critic')
  folder = pathlib.Path(path)
  if folder.parent.name != 'checkpoints':
    raise ValueError(f'--critic={path}: must be WORKDIR/checkpoints/ITERATION')
  stored = config_fields.flatten(
    files.read_stored(folder.parents[1] / 'config.json')
  )
  for name, expected in (
    ('algorithm.name', 'ppo'),
    ('model.path', config.model.path),
    ('lora.rank', 0),
  ):
    if stored.get(name) != expected:
      raise ValueError(
        f'--critic={path}: has {name}={stored.get(name)}; must have {expected}'
      )
  last = stored['critic.warmup_iterations'] - 1
  if int(folder.name) > last:
    raise ValueError(
      f'--critic={path}: its policy has been trained; must be of the warm-up, '
      f'at most checkpoints/{last}'
    )


def save(path: pathlib.Path, setting: str, compared: dict) -> None:
  """Writes cosines by setting; other settings of an earlier file stay."""
  known = files.read_object(path) if path.exists() else {}
  path.write_text(json.dumps(known | {setting: compared}, indent=1) + '\n')


def _interval(samples: Sequence[float]) -> tuple[float, float]:
  low, high = np.nanpercentile(samples, (2.5, 97.5))
  return float(low), float(high)


if __name__ == '__main__':
  main()
