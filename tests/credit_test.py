"""Tests of benchmarks/credit.py with random walks instead of a policy."""

import importlib
import json
import math
import re

import numpy as np
import programs
import pytest
import walks

from configs import keydoor
from gigpo_jax import algorithms, continuations
from gigpo_jax.run import config_fields


@pytest.fixture(name='credit')
def fixture_credit(monkeypatch):
  monkeypatch.syspath_prepend(str(programs.PROJECT / 'benchmarks'))
  return importlib.import_module('credit')


def test_cosines_add_the_products_of_groups(credit):
  groups = np.array([0, 0, 1])
  sums = credit.group_products(
    groups, np.array([1.0, 2, 3]), np.array([4.0, 5, -6])
  )
  np.testing.assert_array_equal(sums, [[14, 5, 41], [-18, 9, 36]])
  expected = (14 - 18) / math.sqrt((5 + 9) * (41 + 36))
  assert credit.cosine(sums.sum(axis=0)) == pytest.approx(expected)
  assert credit.cosine(np.zeros(3)) == 0


def test_table_of_random_walks(credit, monkeypatch, capsys, tmp_path):
  names = ('gigpo', 'grpo', 'g2po', 'ppo', 'vineppo')
  known = {name: algorithms.REGISTRY[name] for name in names}
  monkeypatch.setattr(algorithms, 'REGISTRY', known)
  config = keydoor.get_config('tiny')
  config.env = {
    'name': 'toy',
    'rooms': walks.ROOMS,
    'max_steps': walks.MAX_STEPS,
  }
  config.rollout.episodes_per_group = 4

  def play(config, count):
    groups = walks.make_groups(4, config.rollout.groups)
    ((episodes,), _) = walks.play([groups])
    states = continuations.find_states(episodes)
    batch = continuations.make_batch(states, count, groups)
    return episodes, states, walks.play([batch])[0][0]

  def critic_values(config, path, rows):
    # A perfect critic of the turns.
    assert path == 'run'
    episodes, states, _ = play(config, 1)
    exact = walks.exact_values(states, 1.0)
    values = np.zeros(rows.completion_mask.shape)
    values[rows.real] = exact[np.concatenate(states.indices)][:, None]
    return values

  monkeypatch.setattr(credit, 'play', play)
  monkeypatch.setattr(credit, 'critic_values', critic_values)
  path = tmp_path / 'advantages.npz'
  config.rollout.groups = 6
  compared = credit.measure(config, 32, str(path), 'run')
  lines = capsys.readouterr().out.splitlines()
  found = {
    line.split(' | ')[0].strip('| '): float(line.split(' | ')[1].split()[0])
    for line in lines
    if line.startswith('| ') and 'cosine' not in line
  }
  assert found.keys() == {
    *('gigpo', 'grpo', 'g2po', 'ppo'),
    'gigpo, episode_weight=0',
    'gigpo, discount=1',
    'gigpo, anchor=shuffled',
    'gigpo, anchor=group',
    'gigpo, anchor=state',
    'g2po, anchor=shuffled',
    'g2po, anchor=group',
  }
  assert found['gigpo'] == found['gigpo, anchor=state'] > found['grpo']
  assert found == {
    name: pytest.approx(cells['cosine'][0], abs=5e-4)
    for name, cells in compared['methods'].items()
  }
  assert compared['methods']['gigpo']['minus gigpo'] == (0, 0, 0)
  summary = tmp_path / 'oracle.json'
  credit.save(summary, 'toy', compared)
  credit.save(summary, 'other', {})
  stored = json.loads(summary.read_text())
  assert list(stored) == ['toy', 'other']
  assert stored['toy']['ceiling'] == compared['ceiling']
  # The observation is the state: the oracle approaches the exact advantages.
  arrays = np.load(path)
  episodes, states, _ = play(config, 1)
  values = walks.exact_values(states, 1.0)
  exact = []
  for episode, indices in zip(episodes, states.indices, strict=True):
    before = values[indices]
    rewards = [step.result.reward for step in episode.steps]
    exact += list(rewards + np.append(before[1:], 0) - before)
  cosines = [
    credit.cosine(
      credit.group_products(
        arrays['groups'], arrays[f'oracle {n}'], np.array(exact)
      ).sum(axis=0)
    )
    for n in range(3)
  ]
  (line,) = (line for line in lines if line.startswith('halves'))
  ceiling, half = re.search(r'ceiling (.*), VinePPO .* (.*)', line).groups()
  assert float(ceiling) == pytest.approx(cosines[0], abs=0.02)
  assert float(half) == pytest.approx(np.mean(cosines[1:]), abs=0.02)


def test_the_exact_cosine_has_the_noise_of_both_oracles(credit):
  # A method that equals the oracle: its cosine is 1 in all resamples, and
  # only the ceiling varies.
  groups = np.repeat(np.arange(6), 4)
  rng = np.random.default_rng(0)
  exact = rng.normal(size=24)
  halves = [exact + rng.normal(size=24) for _ in range(2)]
  oracle = sum(halves) / 2
  advantages = {'oracle 0': oracle, 'oracle 1': halves[0]}
  advantages |= {'oracle 2': halves[1], 'gigpo': oracle}
  compared = credit.compare(groups, advantages)
  cells = compared['methods']['gigpo']
  assert cells['cosine'] == pytest.approx((1, 1, 1))
  value, low, high = cells['exact']
  assert value == pytest.approx(1 / compared['ceiling'])
  assert 1 < low < value - 0.01 and high > value + 0.01


@pytest.mark.parametrize(
  ('field', 'value', 'problem'),
  [
    ('algorithm.name', 'gigpo', 'has algorithm.name=gigpo; must have ppo'),
    ('model.path', 'other', 'has model.path=other'),
    ('lora.rank', 4, 'has lora.rank=4'),
    ('critic.warmup_iterations', 8, 'trained; .*, at most checkpoints/7'),
  ],
)
def test_a_critic_of_another_policy_is_refused(
  credit, monkeypatch, tmp_path, field, value, problem
):
  config = keydoor.get_config('mini,ppo')
  config.critic.warmup_iterations = 9  # Iterations 0 to 8.
  stored = config_fields.flatten(config)
  path = str(tmp_path / 'checkpoints' / '8')
  with pytest.raises(ValueError, match='--critic=.*does not exist'):
    credit.check_critic(config, path)
  monkeypatch.setattr(credit.saved_checkpoint, 'check', lambda *_, **__: None)

  def write(fields):
    (tmp_path / 'config.json').write_text(json.dumps(fields, default=str))

  write(stored)
  credit.check_critic(config, path)
  with pytest.raises(ValueError, match='must be WORKDIR/checkpoints/ITERATION'):
    credit.check_critic(config, str(tmp_path))
  write(stored | {field: value})
  with pytest.raises(ValueError, match=f'--critic=.*{problem}'):
    credit.check_critic(config, path)


def test_files_of_results_are_checked_before_the_episodes(credit, tmp_path):
  credit.check_files('', '')
  credit.check_files(str(tmp_path / 'a.npz'), str(tmp_path / 'new.json'))
  for flag, paths in (('output', ('no/a', '')), ('summary', ('', 'no/a'))):
    with pytest.raises(ValueError, match=f'--{flag}=no/a: no such folder'):
      credit.check_files(*paths)
  (tmp_path / 'list.json').write_text('[]')
  with pytest.raises(ValueError, match='list.json: holds no JSON object'):
    credit.check_files('', str(tmp_path / 'list.json'))
