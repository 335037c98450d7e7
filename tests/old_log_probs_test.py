"""Tests of loss.old_log_probs: which log-probs the ratios are relative to."""

import dataclasses
import types

import numpy as np
import pytest
import tiny_learner

from configs import base
from gigpo_jax import losses
from gigpo_jax.run import update_inputs


class _Learner:
  """Counts the passes over all rows."""

  def __init__(self):
    self.subject = tiny_learner.make_learner()
    self.sampler_difference = self.subject.sampler_difference
    self.passes = 0

  def log_probs(self, params, rows):
    self.passes += 1
    return self.subject.log_probs(params, rows)


def _choose(name, gap=0.0, *, tis_clip=None, stale=()):
  """Returns columns, metrics, passes, rows and the learner's log-probs.

  Args:
    name: value of loss.old_log_probs.
    gap: difference between the sampler's and the learner's log-probs.
    tis_clip: value of loss.tis_clip.
    stale: rows that an earlier policy sampled, with a further gap of 0.25.
  """
  config = base.get_config()
  config.loss.old_log_probs = name
  config.loss.tis_clip = tis_clip
  learner, params = _Learner(), tiny_learner.params()
  rows = tiny_learner.make_rows()
  exact = learner.subject.log_probs(params, rows)
  sampled = np.where(rows.completion_mask, exact - np.float32(gap), 0)
  rows = dataclasses.replace(rows, sampler_log_probs=sampled)
  for row in stale:
    rows.ages[row] = 1
    sampled[row] -= np.float32(0.25) * rows.completion_mask[row]
  parts = types.SimpleNamespace(
    config=config,
    learner=learner,
    loss=types.SimpleNamespace(columns=()),
    entropy_band=losses.EntropyBand(),
  )
  state = types.SimpleNamespace(policy=types.SimpleNamespace(params=params))
  history = types.SimpleNamespace(entropies=(), kl_factor=1.0)
  old, metrics = update_inputs.choose_old_log_probs(parts, state, rows)
  columns = update_inputs.loss_columns(parts, state, history, rows, old, 0)
  assert columns['old_log_probs'] is old
  return columns, metrics, learner.passes, rows, exact


@pytest.mark.parametrize(
  ('name', 'gap', 'reused', 'passes'),
  [
    ('learner', 0.0, None, 1),
    ('sampler', 0.5, None, 0),
    # The bound is 0.01 nats.
    ('auto', 0.009, 1.0, 0),
    ('auto', 0.011, 0.0, 1),
    ('auto', np.nan, 0.0, 1),
  ],
)
def test_old_log_probs(name, gap, reused, passes):
  columns, metrics, counted, rows, exact = _choose(name, gap)
  is_sampled = columns['old_log_probs'] is rows.sampler_log_probs
  assert is_sampled == (name == 'sampler' or reused == 1.0)
  if not is_sampled:
    np.testing.assert_array_equal(columns['old_log_probs'], exact)
  assert metrics.get('sampler/log_probs_reused') == reused
  assert counted == passes
  np.testing.assert_allclose(
    metrics['sampler/log_prob_difference_mean'], abs(gap), atol=1e-5
  )


@pytest.mark.parametrize(('gap', 'weight'), [(0.5, np.exp(0.5)), (0.001, 1.0)])
def test_importance_is_one_with_the_log_probs_of_the_sampler(gap, weight):
  columns, _, passes, rows, _ = _choose('auto', gap, tis_clip=2.0)
  assert passes == (weight != 1)  # No pass is needed for weights of 1.
  weights = np.broadcast_to(columns['importance'], rows.completion_mask.shape)
  np.testing.assert_allclose(weights[rows.completion_mask], weight, rtol=1e-5)


@pytest.mark.parametrize(
  ('name', 'gap', 'passes'),
  [('learner', 0.5, 1), ('auto', 0.5, 1), ('auto', 0.001, 1)],
)
def test_rows_of_an_earlier_policy_have_importance_weights(name, gap, passes):
  columns, metrics, counted, rows, exact = _choose(
    name, gap, tis_clip=1.5, stale=(1, 3)
  )
  reused = metrics.get('sampler/log_probs_reused') == 1.0
  assert reused == (gap < 0.01) and counted == passes
  # The sampler is compared on rows of the current policy only.
  np.testing.assert_allclose(
    metrics['sampler/log_prob_difference_mean'], gap, atol=1e-5
  )
  old, weights = columns['old_log_probs'], columns['importance']
  mask, is_stale = rows.completion_mask, rows.ages == 1
  sampled = rows.sampler_log_probs
  fresh = sampled if reused else exact
  np.testing.assert_array_equal(old[~is_stale], fresh[~is_stale])
  np.testing.assert_allclose(old[is_stale], exact[is_stale], atol=1e-6)
  # min(exp(0.25 + gap), 1.5): exp(0.25) = 1.284, exp(0.75) = 2.117.
  expected = 1.5 if gap == 0.5 else np.exp(0.25 + gap)
  np.testing.assert_allclose(weights[is_stale][mask[is_stale]], expected, 1e-5)
  expected = 1.0 if reused else min(np.exp(gap), 1.5)
  np.testing.assert_allclose(
    weights[~is_stale][mask[~is_stale]], expected, 1e-5
  )


def test_without_importance_weights_ratios_are_to_the_policy_that_sampled():
  columns, _, counted, rows, _ = _choose('sampler', 0.001, stale=(1, 3))
  assert columns['old_log_probs'] is rows.sampler_log_probs
  assert columns['importance'] == 1.0 and counted == 0


@pytest.mark.parametrize('name', ['learner', 'auto'])
def test_all_rows_may_be_of_earlier_policies(name):
  columns, metrics, _, rows, exact = _choose(
    name, 0.1, tis_clip=2.0, stale=range(len(tiny_learner.make_rows().ages))
  )
  np.testing.assert_array_equal(columns['old_log_probs'], exact)
  assert 'sampler/log_prob_difference_mean' not in metrics
