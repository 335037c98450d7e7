"""Tests of modulators: golden values, a slow reference, edge cases."""

import dataclasses

import algorithm_rows
import numpy as np
import pytest
import slow_plugins

from configs import alfworld
from gigpo_jax import algorithms, branching, builders, modulators, plugins
from gigpo_jax import config as config_lib
from gigpo_jax.modulators import adora, dcpo, dgpo, egpo, empg, progrpo

NAMES = tuple(modulators.REGISTRY)


def random_signals(rows, seed):
  """Returns random outputs of a learner for rows."""
  rng = np.random.default_rng(seed)
  mask = rows.completion_mask
  outputs = {
    name: np.where(mask, -rng.exponential(size=mask.shape), 0)
    for name in ('log_probs', 'log_probs@0.8', 'log_probs@1.2')
  }
  outputs['entropies'] = -rng.uniform(0.1, 1) * outputs['log_probs']
  # A vocabulary of two tokens, whose powers are p^k and (1 - p)^k.
  log_probs = outputs['log_probs']
  for k in (2, 3):
    probs = np.exp(log_probs)
    sums = np.log(probs**k + (1 - probs) ** k)
    outputs[f'log_probs@{1 / k}'] = np.where(mask, k * log_probs - sums, 0)
  outputs['feature_squares'] = np.where(mask, rng.uniform(0, 9, mask.shape), 0)
  shape = len(mask), rows.tokens.shape[1] - 1
  outputs['prompt_log_probs'] = -rng.exponential(size=shape)
  return plugins.Signals(
    outputs, progress=0.5, seed=(1, seed), learning_rate=0.1
  )


def random_case(seed, groups=4):
  """Returns rows with longer prompts, their advantages and signals."""
  rows = algorithm_rows.random_rows(seed, groups)
  rng = np.random.default_rng(seed)
  rows.truncated[:] = rng.random(len(rows.groups)) < 0.1
  prompts = rng.integers(2, 5, len(rows.groups))
  completions = rows.lengths - rows.prompt_lengths
  rows = dataclasses.replace(
    rows,
    prompt_lengths=np.where(rows.real, prompts, 0),
    lengths=np.where(rows.real, prompts + completions, 0),
    tokens=np.zeros((len(rows.groups), 11), np.int32),
    sampler_log_probs=np.where(
      rows.completion_mask, -rng.exponential(size=(len(prompts), 6)), 0
    ),
  )
  advantages = np.where(rows.real, rng.normal(size=len(prompts)), 0)
  return rows, advantages, random_signals(rows, seed)


OPTIONS = [
  ('adora', {'length_unit': 'tokens', 'short_weight': 0.5}),
  ('dcpo', {'target_entropy': 0.0}),
  ('dcpo', {'target_limit': 1.0}),
  ('dgpo', {'accuracy_temperature': 0.5}),
  ('egpo', {'entropy_bonus': 5.0, 'entropy_bound': 1.5}),
  ('empg', {'confidence_rate': 2.0, 'clarity_weight': 0.5}),
  ('progrpo', {'confidence_weight': 0.7, 'confidence_share': 0.5}),
]


@pytest.mark.parametrize(
  ('name', 'options'), [*((name, {}) for name in NAMES), *OPTIONS], ids=str
)
def test_modulators_match_a_slow_reference(name, options):
  (modulator,) = modulators.FAMILY.make({'modulators': (name,)} | options)
  for seed in range(4):
    rows, advantages, signals = random_case(seed)
    actual = modulators.apply([modulator], advantages, rows, signals)
    assert actual.dtype == np.float32
    table = slow_plugins.Table(rows, advantages, signals)
    expected = getattr(slow_plugins, name)(table, **options)
    tokens = actual if actual.ndim > 1 else actual[:, None]
    tokens = np.broadcast_to(tokens, rows.completion_mask.shape)
    for r, values in expected.items():
      np.testing.assert_allclose(tokens[r, : len(values)], values, atol=2e-6)
    assert not tokens[~rows.real].any()


@pytest.mark.parametrize('name', NAMES)
def test_advantages_of_tokens_are_accepted(name):
  # Equal tokens of a row give the same result as one advantage per row.
  (modulator,) = modulators.FAMILY.make({'modulators': (name,)})
  rows, advantages, signals = random_case(0)
  mask = rows.completion_mask
  by_token = np.where(mask, advantages[:, None], 0)
  one, other = (
    modulators.apply([modulator], a, rows, signals)
    for a in (advantages, by_token)
  )
  one = np.where(mask, one if one.ndim > 1 else one[:, None], 0)
  np.testing.assert_allclose(np.where(mask, other, 0), one, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_a_lone_failed_episode_stays_finite(name):
  rows = algorithm_rows.golden_rows()
  rows.groups[3:8] = -1
  rows.lengths[3:], rows.prompt_lengths[3:] = 0, 0
  rows.rewards[:], rows.success[:] = 0, False
  (modulator,) = modulators.FAMILY.make({'modulators': (name,)})
  actual = modulators.apply(
    [modulator], np.zeros(10), rows, random_signals(rows, 0)
  )
  assert np.isfinite(actual).all()
  if name != 'empg':  # It rewards clarity in all episodes.
    np.testing.assert_array_equal(actual, 0)


def test_mean_absolute_deviation_by_hand():
  # Returns 10, 0, 10: mean 6.6667, |deviations| 3.3333 + 6.6667 + 3.3333 =
  # 13.3333; 3 * 3.3333 / 13.3333 = .75.
  actual = algorithms.make('grpo', norm='mean_abs').compute_advantages(
    algorithm_rows.golden_rows()
  )
  expected = np.repeat([0.75, -1.5, 0.75, 0], [3, 3, 2, 2])
  np.testing.assert_allclose(actual.advantages, expected, atol=2e-5)


def test_dgpo_by_hand():
  # exp(-.375), exp(-.125), exp(-.25): .6873 .8825 .7788, sum 2.3486, times 3.
  np.testing.assert_allclose(
    dgpo.group_weights(np.array([0.75, 0.25, 0.5]), 2.0),
    [0.8779, 1.1273, 0.9948],
    atol=1e-4,
  )
  # Group 0 has 6 of the 8 tokens and both outcomes; group 1 one episode.
  rows = algorithm_rows.golden_rows()
  rows.groups[6:8] = 1
  actual = dgpo.Modulator()(np.ones(10), rows, plugins.Signals())
  np.testing.assert_allclose(actual[:8], [8 / 6] * 6 + [1] * 2)
  # Episodes 0 and 1 share two responses, which are trained on once: 4 of 6.
  rows.responses[3:5] = rows.responses[:2]
  actual = dgpo.Modulator()(np.ones(10), rows, plugins.Signals())
  np.testing.assert_allclose(actual[:8], [6 / 4] * 6 + [1] * 2)


def test_dgpo_counts_invalid_responses():
  rows = algorithm_rows.golden_rows()
  rows.groups[6:8], rows.rewards[:] = 1, 0
  rows.valid[:] = np.arange(10) != 3
  for penalty, weight in ((0.0, 1), (0.1, 8 / 6)):
    signals = plugins.Signals(invalid_penalty=penalty)
    actual = dgpo.Modulator()(np.ones(10), rows, signals)
    np.testing.assert_allclose(actual[:8], [weight] * 6 + [1] * 2)


def test_sums_that_cancel_are_equal():
  rows = algorithm_rows.golden_rows()
  # Group 0 has the returns .1 + .2 - .3 = 5.6e-17 and 0, and so no signal.
  rows.rewards[:8] = [0.1, 0.2, -0.3, 0, 0, 0, 0, 10]
  rows.groups[6:8], rows.episodes[7] = 1, 3
  actual = dgpo.Modulator()(np.ones(10), rows, plugins.Signals())
  np.testing.assert_allclose(actual[:8], [1] * 6 + [8 / 2] * 2)


@pytest.mark.parametrize(
  ('right', 'wrong', 'weight'),
  [
    ((5, 9), (6, 7), 1.0),
    ((5,), (6, 7), 0.1),
    ((5,), (2, 6), 1.0),
    ((), (3,), 0.1),
    ((3,), (), 1),
  ],
)
def test_adora_by_hand(right, wrong, weight):
  lengths = np.array(right, int), np.array(wrong, int)
  assert adora.Modulator()._weight(*lengths) == weight


def test_egpo_keeps_the_sign():
  rows, advantages, signals = random_case(0)
  signals.outputs['entropies'][:] *= 1000
  actual = egpo.Modulator()(advantages, rows, signals)
  np.testing.assert_array_equal(np.sign(actual), np.sign(advantages))
  np.testing.assert_allclose(actual, advantages + np.abs(advantages) / 2)
  with pytest.raises(ValueError, match='entropy_bound=1.0: .* above 1'):
    egpo.Modulator(entropy_bound=1.0)


def test_empg_by_hand():
  # H of .2, .4, 1 is 0, .25, 1 when scaled; exp(-H) 1 .7788 .3679, mean .7156.
  rows = algorithm_rows.golden_rows()
  rows.groups[3:8] = -1
  gains, clarity = empg.Modulator().factors(
    np.array([0.2, 0.4, 1.0, *[0] * 7]), rows
  )
  np.testing.assert_allclose(gains[:3], [1.3975, 1.0884, 0.5141], atol=1e-4)
  np.testing.assert_allclose(clarity[:3], [0.7788, 0.3679, 0], atol=1e-4)
  # Equal entropies leave the gains at 1.
  gains, _ = empg.Modulator().factors(np.full(10, 0.3), rows)
  np.testing.assert_array_equal(gains, 1)


@pytest.mark.parametrize('per_token', [False, True])
def test_empg_counts_a_shared_step_once(per_token):
  rows = algorithm_rows.golden_rows()
  # Episode 1 branches from episode 0 after its first step.
  rows.groups[6:8] = -1
  rows.responses[3] = rows.responses[0]
  entropies = np.array([[0.2], [0.4], [1.0], [0.2], [0.9], [0.1], *[[0]] * 4])
  signals = plugins.Signals({'entropies': entropies})
  advantages = np.array([1.0, 1, 1, -1, -1, -1, *[0] * 4])
  given = advantages[:, None] if per_token else advantages
  actual = empg.Modulator()(given, rows, signals)
  trained = rows.real & ~rows.repeated
  assert trained.sum() == 5
  assert branching.merge(actual, rows)[trained].mean() == pytest.approx(0)
  gains, _ = empg.Modulator().factors(entropies[:, 0], rows)
  assert gains[trained].mean() == pytest.approx(1)


def test_progrpo_by_hand():
  # Responses of one token with probabilities .8 and .2, prompts with .5:
  # 1 + .1 (.5 - .8) = .97; -1 + .1 (.5 - .2) = -.97. The group has a success.
  rows = algorithm_rows.golden_rows()
  rows.groups[2:8] = -1
  rows.episodes[1], rows.success[0] = 1, True
  log_probs = np.log(np.array([[0.8], [0.2], *[[1]] * 8]))
  signals = plugins.Signals(
    {
      'log_probs': log_probs,
      'prompt_log_probs': np.log(np.full((10, 2), 0.5)),
    }
  )
  advantages = np.array([1.0, -1.0, *[0] * 8])
  actual = progrpo.Modulator()(advantages, rows, signals)
  np.testing.assert_allclose(actual[:2], [0.97, -0.97])
  rows.success[:] = False
  actual = progrpo.Modulator()(advantages, rows, signals)
  np.testing.assert_array_equal(actual, advantages)


def test_dcpo_by_hand():
  # min(.3, .1) / .5 = .2; .2 / 1.2 = .1667. Above the target: min(.05, .1).
  subject = dcpo.Modulator()
  assert subject.weight(0.2, 0.5) == pytest.approx(1 / 6)
  assert subject.weight(0.55, 1.0) == pytest.approx(0.05 / 1.05)


def test_dcpo_counts_a_shared_step_once():
  rows = algorithm_rows.golden_rows()
  rows.groups[2:8] = -1
  rows.lengths[2:8] = rows.prompt_lengths[2:8]
  rows.episodes[1], rows.success[:2] = 1, [False, True]
  rows.responses[1] = rows.responses[0]
  zeros = np.zeros((10, 1))
  names = ('log_probs', 'log_probs@0.8', 'log_probs@1.2')
  signals = plugins.Signals(
    {'entropies': zeros + 0.2, **dict.fromkeys(names, zeros)}
  )
  # The second row, a repetition, does not raise H above the target.
  signals.outputs['entropies'][1] = 2.0
  signals.outputs['log_probs@1.2'] = np.log(np.full((10, 1), 0.5))
  actual = dcpo.Modulator()(np.zeros(10), rows, signals)
  # alpha = .1667 (see above), times a success with ratio .5.
  np.testing.assert_allclose(actual[:2], [[0], [1 / 12]])


def test_an_empty_chain_changes_nothing():
  advantages = np.array([0.1, -2], np.float32)
  rows = algorithm_rows.golden_rows()
  actual = modulators.apply((), advantages, rows, plugins.Signals())
  assert actual is advantages


def double(advantages, rows, signals):
  """Doubles advantages; a modulator of another project."""
  del rows, signals
  return 2 * advantages


class NeedsAnotherName(egpo.Modulator):
  """Needs an output that the learner does not have."""

  needs = ('entropy',)


class NeedsLogProbs(egpo.Modulator):
  """Needs the learner's log-probs."""

  needs = ('log_probs',)


def test_a_chain_applies_in_order():
  rows, advantages, signals = random_case(0)
  names = ('egpo', 'modulators_test:double')
  chain = modulators.FAMILY.make({'modulators': names})
  expected = 2 * egpo.Modulator()(advantages, rows, signals)
  actual = modulators.apply(chain, advantages, rows, signals)
  np.testing.assert_allclose(actual, expected, rtol=1e-6)
  assert plugins.needed_outputs(chain) == ('entropies',)


@pytest.mark.parametrize(
  ('old_log_probs', 'expected'),
  [('learner', ()), ('sampler', ('log_probs',)), ('auto', ('log_probs',))],
)
def test_log_probs_are_the_learners(old_log_probs, expected):
  config = alfworld.get_config('mini')
  config.algorithm.modulators = ('modulators_test:NeedsLogProbs',)
  config.loss.old_log_probs = old_log_probs
  assert builders.signal_names(config) == expected


@pytest.mark.parametrize(
  ('variant', 'changes', 'line'),
  [
    (
      'mini',
      {'algorithm.modulators': ('dgpoo',)},
      'algorithm.modulators=dgpoo: unknown .*; must be of adora, .*function',
    ),
    (
      'mini',
      {'algorithm.modulators': ('dgpo', 'dgpo')},
      'algorithm.modulators=.*: names one twice; must be different names',
    ),
    (
      'mini',
      {'algorithm.modulators': ('modulators_test:NeedsAnotherName',)},
      'needs entropy; must be of log_probs, entropies, prompt_log_probs, ',
    ),
    (
      'mini,dgpo',
      {'rollout.episodes_per_group': 1},
      'episodes_per_group=1: dgpo compares the episodes',
    ),
    (
      'mini',
      {'algorithm.clarity_weight': 0.5},
      r'clarity_weight=0.5: not an option of .*modulators=\(\); must be 0.1',
    ),
    (
      'mini,snr',
      {'filter.group_share': 0.0},
      'filter.group_share=0.0: out of range; must be above 0',
    ),
    (
      'mini',
      {'filter.kept_episodes': 2},
      r'filter.kept_episodes=2: not an option of filter.select=\(\); must be 4',
    ),
    (
      'mini,mismatch',
      {'loss.old_log_probs': 'sampler'},
      'loss.old_log_probs=sampler: mismatch compares .*; must be learner',
    ),
    (
      'mini,d3s',
      {'filter.variance_rows': (0.5, 2.0)},
      'variance_rows=.*: must be two shares above 0',
    ),
  ],
)
def test_refused_chains(variant, changes, line):
  config = alfworld.get_config(variant)
  config.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=line):
    config_lib.validate(config)


def test_variants_extend_the_chains():
  config = alfworld.get_config('mini,grpo,snr,empg,dgpo')
  assert config.algorithm.modulators == ('dgpo', 'empg')
  assert config.filter.select == ('snr',)
  assert config.algorithm.name == 'grpo'
  assert config.algorithm.norm == 'mean_abs'
