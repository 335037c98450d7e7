"""Tests of segment DPO."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny_learner

from configs import alfworld
from gigpo_jax import batch, config, preference, sft, token_batch


def step(anchor, response, reward=0.0, agent='', team_reward=None):
  return {
    'anchor': anchor,
    'completion_ids': np.array([response], np.int32),
    'prompt_ids': np.array([1, 2], np.int32),
    'reward': reward,
    'team_reward': reward if team_reward is None else team_reward,
    'agent': agent,
    'is_last': False,
  }


def episode(*steps, task=0, failure=''):
  end = {'is_last': True, 'anchor': 'a', 'agent': '', 'reward': 0.0}
  return {
    'task_split': 'train',
    'task_index': task,
    'failure': failure,
    'steps': [*steps, end],
  }


def responses(pairs):
  """Returns the responses of the turns of each pair."""
  return [
    tuple(
      [int(s['completion_ids'][0]) for s in segment]
      for segment in (pair.better, pair.worse)
    )
    for pair in pairs
  ]


def test_pairs_share_a_state_and_differ_in_reward():
  episodes = [
    # From a: 10, from b: 10.
    episode(step('a', 1), step('b', 2), step('c', 3, 10.0)),
    # From a: 0, from b: 0; the second visit of a does not count.
    episode(step('a', 4), step('a', 5), step('b', 6)),
    # From a: 5, with the response of the first episode.
    episode(step('a', 1), step('d', 7, 5.0)),
    # Nothing is known about it, and another task.
    episode(step('a', 8), failure='hung: 3 s'),
    episode(step('a', 9, 20.0), task=1),
  ]
  pairs = preference.make_pairs(episodes, segment_turns=2, team=True)
  # In a: best (10) against worst (0), the middle one is left. In b: 10 and 0;
  # the second one has a single turn.
  assert responses(pairs) == [([1, 2], [4, 5]), ([2], [6])]


def test_pairs_of_equal_rewards_or_responses_are_left_out():
  episodes = [
    episode(step('a', 1), step('b', 2, 10.0)),
    episode(step('a', 1), step('b', 3, 0.0)),
    episode(step('a', 4), step('c', 2, 5.0)),
    episode(step('a', 5), step('c', 2, 5.0)),
  ]
  # In a, 10 and 0 begin with response 1, and 5 is not above 5.
  pairs = preference.make_pairs(episodes, 9, team=True)
  assert responses(pairs) == [([2], [3])]


def test_pairs_are_of_one_task_and_differ_anywhere_in_the_response():
  others = [
    episode(step('a', 1, 10.0)),
    episode(step('a', 2, 0.0)) | {'task_split': 'test'},
  ]
  assert preference.make_pairs(others, 9, team=True) == []
  longer = [
    episode(
      step('a', 1) | {'completion_ids': np.array([1, last], np.int32)},
      *(step(f'{last}{n}', 3) for n in range(4)),
      # A reward counts however late it is.
      step('end', 3, float(last)),
    )
    for last in (5, 6)
  ]
  assert responses(preference.make_pairs(longer, 1, team=True)) == [([1], [1])]


@pytest.mark.parametrize('is_first', [False, True])
@pytest.mark.parametrize('reward', [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(reward, is_first):
  rewards = (reward, 1.0) if is_first else (1.0, reward)
  experiment = alfworld.get_config('tiny')
  experiment.sft.data = 'runs/a/episodes'
  with pytest.raises(ValueError) as error:
    sft.pair_rows(
      experiment, None, [episode(step('a', n, rewards[n])) for n in range(2)]
    )
  assert str(error.value) == (
    'sft.data=runs/a/episodes: an episode of train/0 has rewards with the sum '
    f'{reward}; must be finite'
  )


def test_rounding_errors_of_equal_returns_make_no_pair():
  # 0.7 and 0.7000000000000001, in the order of the turns.
  episodes = [
    episode(step('a', 1, -0.1), step('b', 2, -0.1), step('c', 3, 0.9)),
    episode(step('a', 4, 0.9), step('d', 2, -0.1), step('e', 3, -0.1)),
  ]
  assert preference.make_pairs(episodes, 9, team=True) == []


def test_agents_are_compared_with_themselves():
  episodes = [
    episode(step('a', 1, 1.0, 'x', 1.0), step('a', 2, 0.0, 'y')),
    episode(step('a', 3, 0.0, 'x', 1.0), step('a', 4, 1.0, 'y')),
  ]
  pairs = preference.make_pairs(episodes, 9, team=False)
  assert responses(pairs) == [([1], [3]), ([4], [2])]
  # In the sum of both, the first state has no better episode.
  pairs = preference.make_pairs(episodes, 9, team=True)
  assert responses(pairs) == [([4], [2])]


def test_the_rewards_of_a_team_are_those_of_each_agent():
  episodes = [
    episode(step('a', 1, 0.0, 'x', reward), step('b', 2, reward, 'y'))
    | {'success': bool(reward)}
    for reward in (1.0, 0.0)
  ]
  episodes[1]['steps'][0]['completion_ids'] = np.array([3], np.int32)
  episodes[1]['steps'][1]['completion_ids'] = np.array([4], np.int32)
  pairs = preference.make_pairs(episodes, 9, team=True)
  assert responses(pairs) == [([1], [3]), ([2], [4])]
  pairs = preference.make_pairs(episodes, 9, team=False)
  assert responses(pairs) == [([2], [4])]


def make_pair_rows(rows, lengths, *, beta=0.1, seed=0):
  """Returns pairs of segments with these numbers of turns."""
  pairs = [
    preference.Pair(*(({},) * size for size in sizes)) for sizes in lengths
  ]
  own = preference.PairRows.of(pairs, rows, beta)
  noise = np.random.default_rng(seed).normal(-3, 1, own.ref_log_probs.shape)
  return dataclasses.replace(own, ref_log_probs=noise.astype(np.float32))


def loss_and_metrics(own, row_ids, log_probs):
  """Returns the mean loss over the tokens of an update, and its metrics."""
  columns, metrics = own.columns(row_ids, log_probs)
  mask = own.rows.completion_mask[row_ids]
  row, column = np.nonzero(mask)
  tokens = token_batch.make(
    jnp.ones((1, len(row)), bool),
    jnp.asarray(row[None]),
    {name: jnp.asarray(x[row][None]) for name, x in columns.items()},
  )

  def mean_loss(log_probs_RC):
    outputs = token_batch.PolicyOutputs(
      log_probs_RC[row, column][None], jnp.zeros((1, len(row)))
    )
    return preference.FirstOrder()(outputs, tokens)[0].mean()

  value, gradient = jax.value_and_grad(mean_loss)(jnp.asarray(log_probs))
  return value, gradient, metrics


def test_golden_value():
  # log-ratios 1.5 of w and -.5 of l: margin .1 x 2, -log sigmoid(.2) = .5981.
  rows = batch.pack(
    [np.array([1])] * 2,
    [np.array([2, 3]), np.array([4])],
    max_prompt_tokens=1,
    max_completion_tokens=2,
    row_multiple=2,
  )
  own = make_pair_rows(rows, [(1, 1)])
  change = np.array([[0.5, 1.0], [-0.5, 7.0]], np.float32)
  value, gradient, metrics = loss_and_metrics(
    own, np.arange(2), own.ref_log_probs + change
  )
  assert value == pytest.approx(0.5981, abs=5e-5)
  assert metrics['preference/margin'] == pytest.approx(0.2)
  assert metrics['preference/accuracy'] == 1
  # beta sigmoid(-.2) = .1 x .45017; nothing past a completion.
  expected = [[-0.045017, -0.045017], [0.045017, 0]]
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_a_large_margin_teaches_nothing():
  own = make_pair_rows(tiny_learner.make_rows(2), [(1, 1)], beta=1.0)
  distance = own.signs[:2, None] * 500.0
  value, gradient, metrics = loss_and_metrics(
    own, np.arange(2), (own.ref_log_probs[:2] + distance).astype(np.float32)
  )
  assert metrics['preference/margin'] > 709  # exp overflows.
  assert value == 0
  np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize('seed', range(4))
def test_columns_match_torch(seed):
  torch = pytest.importorskip('torch')
  rng = np.random.default_rng(seed)
  rows = tiny_learner.make_rows(12, seed=seed)
  lengths = [(2, 2), (1, 1), (3, 3)]
  own = make_pair_rows(rows, lengths, beta=0.5, seed=seed)
  row_ids = rng.permutation(12)
  noise = rng.normal(0, 0.7, own.ref_log_probs.shape)
  log_probs = (own.ref_log_probs + noise).astype(np.float32)
  value, gradient, metrics = loss_and_metrics(own, row_ids, log_probs[row_ids])
  # Of all rows, in order: w and l of each pair.
  x = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
  ratio = (x - torch.tensor(own.ref_log_probs)) * torch.tensor(
    rows.completion_mask
  )
  total, margins, start = 0.0, [], 0
  for better, worse in lengths:
    middle, end = start + better, start + better + worse
    margins.append(0.5 * (ratio[start:middle].sum() - ratio[middle:end].sum()))
    total = total - torch.nn.functional.logsigmoid(margins[-1])
    start = end
  (total / len(lengths)).backward()
  assert value == pytest.approx(total.item() / len(lengths), rel=1e-5)
  np.testing.assert_allclose(gradient, x.grad[row_ids], atol=1e-6)
  accuracy = np.mean([m.item() > 0 for m in margins])
  assert metrics['preference/accuracy'] == pytest.approx(accuracy)


def test_an_update_descends_the_gradient_of_the_whole_loss():
  rows = tiny_learner.make_rows(8, row_multiple=8)
  own = make_pair_rows(rows, [(1, 1), (3, 3)], beta=0.5)
  # Of several microbatches, so that a pair is in more than one of them.
  subject = tiny_learner.sgd(loss=preference.FirstOrder(), minibatch_rows=8)
  state = subject.init(tiny_learner.params())
  columns, _ = own.columns(np.arange(8), subject.log_probs(state.params, rows))
  state, metrics = subject.update(state, rows, iteration=0, **columns)
  assert metrics['update/count'] == 1
  signs = jnp.asarray(own.signs, jnp.float32)

  @jax.jit
  @jax.value_and_grad
  def whole(params):
    log_probs, _ = reference.completion_log_probs(
      tiny_learner.CONFIG,
      params,
      jnp.asarray(rows.tokens),
      jnp.asarray(rows.prompt_lengths),
      max_completion=tiny_learner.C,
    )
    ratios = jnp.where(rows.completion_mask, log_probs - own.ref_log_probs, 0)
    sums = 0.5 * signs * ratios.sum(axis=1)
    margins = jnp.array([sums[:2].sum(), sums[2:].sum()])
    return -jax.nn.log_sigmoid(margins).mean()

  value, gradient = whole(tiny_learner.params())
  assert metrics['loss/total'] == pytest.approx(float(value), rel=1e-5)
  changed = jax.tree.map(np.subtract, tiny_learner.params(), gradient)
  tiny_learner.assert_trees_close(state.params, changed, 1e-5)


def test_updates_hold_whole_pairs():
  rows = tiny_learner.make_rows(14)
  own = make_pair_rows(rows, [(2, 2), (1, 1), (3, 3), (1, 1)])
  updates = [*own.updates(epochs=2, most_rows=6)]
  assert [epoch for epoch, _ in updates] == sorted(e for e, _ in updates)
  others = own.updates(epochs=2, most_rows=6, seed=1)
  orders = [[list(ids) for _, ids in x] for x in (updates, others)]
  assert orders[0] != orders[1]
  first, second = ([ids for e, ids in updates if e == n] for n in range(2))
  assert list(np.concatenate(first)) != list(np.concatenate(second))
  for epoch in range(2):
    ids = [ids for e, ids in updates if e == epoch]
    assert all(len(x) <= 6 for x in ids)
    assert sorted(np.concatenate(ids)) == list(range(14))
    for x in ids:
      for pair in np.unique(own.pairs[x]):
        assert (own.pairs[x] == pair).sum() == (own.pairs == pair).sum()
  assert own.count == 4


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({}, 'sft.data=: sft.loss=dpo needs a folder'),
    (
      {'data': 'x', 'segment_turns': 9, 'minibatch_rows': 16},
      'sft.segment_turns=9: .*at most half of sft.minibatch_rows=16',
    ),
    ({'data': 'x', 'beta': 0.0}, 'sft.beta=0.0: out of range'),
    ({'loss': 'imitation', 'beta': 0.5}, 'sft.beta=0.5: has no effect'),
  ],
)
def test_options_that_dpo_cannot_use_are_refused(changes, message):
  own = alfworld.get_config('tiny')
  own.sft.update({'loss': 'dpo'} | changes)
  with pytest.raises(ValueError, match=message) as error:
    config.validate(own, needs_model=False)
  assert '\n' not in str(error.value)


def test_episodes_without_pairs_are_refused():
  own = alfworld.get_config('tiny')
  episodes = type('Set', (list,), {'source': [1]})([episode(step('a', 1))])
  with pytest.raises(ValueError, match='sft.data=: no two of 1 episodes'):
    sft.pair_rows(own, None, episodes)


def test_a_warm_start_compares_with_its_first_policy(monkeypatch, tmp_path):
  """Runs the loop with a learner whose log-probs change with each update."""
  own = alfworld.get_config('tiny')
  own.sft.update(loss='dpo', minibatch_rows=4, learning_rate=0.25)
  own.loss.aggregation = 'sequence_mean'
  rows = tiny_learner.make_rows(8, row_multiple=8)
  pairs = make_pair_rows(rows, [(2, 2), (2, 2)], beta=0.5)
  pairs = dataclasses.replace(pairs, ref_log_probs=0 * pairs.ref_log_probs)
  seen, written = [], []

  class Learner:
    base: dict = {}

    def init(self, params):
      return types.SimpleNamespace(params=params)

    def log_probs(self, params, rows):
      change = params * rows.lengths[:, None] / 10
      return np.where(rows.completion_mask, -1 + change, 0).astype(np.float32)

    def update(self, state, rows, *, iteration, skipped_before, **columns):
      seen.append((rows, columns))
      metrics = dict.fromkeys(
        [f'update/{x}in_row' for x in ('skipped_', 'most_skipped_')],
        skipped_before,
      )
      metrics['loss/total'] = 0.0
      return types.SimpleNamespace(params=state.params + 1), metrics

  def make_learner(config, policy, loss):
    assert config.loss.aggregation == 'token_mean'
    assert config.optimizer.learning_rate == 0.25
    assert config.optimizer.decay_updates == 2
    assert isinstance(loss, preference.FirstOrder)
    return Learner()

  writer = types.SimpleNamespace(
    write=lambda _, values: written.append(values), close=lambda: None
  )
  monkeypatch.setattr(sft.builders, 'make_learner', make_learner)
  monkeypatch.setattr(sft.builders, 'make_writer', lambda *_: writer)
  monkeypatch.setattr(sft.remat, 'resolve', lambda _, policy: policy)
  monkeypatch.setattr(sft.lora, 'combine', lambda _, params: params)
  policy = types.SimpleNamespace(load=lambda: 0)
  assert sft._fit(own, policy, rows, pairs, str(tmp_path)) == 2
  start = dataclasses.replace(pairs, ref_log_probs=Learner().log_probs(0, rows))
  for n, (_, row_ids) in enumerate(pairs.updates(1, 4, own.seed)):
    log_probs = Learner().log_probs(n, rows.take(row_ids))
    columns, metrics = start.columns(row_ids, log_probs)
    np.testing.assert_array_equal(seen[n][0].tokens, rows.tokens[row_ids])
    for name, column in columns.items():
      np.testing.assert_allclose(seen[n][1][name], column, rtol=1e-6)
    assert written[n]['preference/margin'] == metrics['preference/margin']
  assert written[0]['preference/margin'] == 0 != written[1]['preference/margin']


def test_loss_and_margin_at_the_start():
  rows = tiny_learner.make_rows(4, row_multiple=4)
  own = make_pair_rows(rows, [(1, 1), (1, 1)])
  value, _, metrics = loss_and_metrics(own, np.arange(4), own.ref_log_probs)
  assert value == pytest.approx(math.log(2))
  assert metrics == {'preference/margin': 0, 'preference/accuracy': 0}
