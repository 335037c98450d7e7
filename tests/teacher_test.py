"""Tests of a teacher in RL (CHORD): schedule, token weights, updates."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import small_runs
from tiny_learner import assert_trees_close, make_rows, sgd, step

from configs import alfworld
from gigpo_jax import config as config_lib
from gigpo_jax import episodes, losses, sft, teacher, token_batch
from gigpo_jax.run import teacher_builders

LOSS = losses.PolicyGradient(kl_weight=0.0)
PLAIN = losses.PolicyGradient(kl_weight=0.0, entropy_weight=0.0)


def test_schedule_by_hand():
  # Rises over 4 iterations, falls over 6: half a cosine from 0.9 to 0.1.
  options = teacher.Options(
    mu_peak=0.9, mu_valley=0.1, warmup_iterations=4, decay_iterations=6
  )
  expected = {
    0: 0.0,
    1: 0.225,
    4: 0.9,
    6: 0.1 + 0.8 * 0.75,  # cos(pi / 3) = 0.5
    7: 0.5,
    10: 0.1,
    99: 0.1,
  }
  for iteration, mu in expected.items():
    assert options.mu(iteration) == pytest.approx(mu)
  assert teacher.Options(mu_peak=0.1).mu(50) == 0.1


def test_token_weights_by_hand():
  # p (1 - p): 0.5 -> 0.25; 0.9 -> 0.09; 0 and 1 -> 0.
  log_probs = jnp.log(jnp.array([0.5, 0.9, 0.0, 1.0]))
  actual = teacher.uncertainty(log_probs)
  np.testing.assert_allclose(actual, [0.25, 0.09, 0, 0], atol=1e-6)


def test_loss_by_hand():
  log_probs = jnp.log(jnp.array([[0.5, 0.9, 0.25]]))
  outputs = token_batch.PolicyOutputs(log_probs, jnp.ones_like(log_probs))
  mask = jnp.array([[True, True, False]])
  tokens = token_batch.make(mask, jnp.zeros((1, 3), int), {})
  loss, metrics = teacher.Imitation()(outputs, tokens)
  expected = [0.25 * math.log(2), -0.09 * math.log(0.9), 0]
  np.testing.assert_allclose(loss[0], expected, atol=1e-6)
  assert not metrics

  def total(log_probs):
    changed = dataclasses.replace(outputs, log_probs=log_probs)
    return teacher.Imitation()(changed, tokens)[0].sum()

  # The weights are constants: minus p (1 - p).
  np.testing.assert_allclose(
    jax.grad(total)(log_probs)[0], [-0.25, -0.09, 0], atol=1e-6
  )
  plain, _ = teacher.Imitation('none')(outputs, tokens)
  expected = [math.log(2), -math.log(0.9), 0]
  np.testing.assert_allclose(plain[0], expected, atol=1e-6)


def test_an_iteration_has_different_rows():
  options = teacher.Options(mu_peak=1.0, rows=12)
  taught = teacher.Teacher(options, None, seed=3)
  available = np.arange(20) % 3 > 0  # 13 rows
  chosen = [taught.choose(available, n) for n in range(6)]
  assert all(len(set(rows)) == 12 and available[rows].all() for rows in chosen)
  assert len({tuple(rows) for rows in chosen}) > 1


def test_a_teacher_shows_its_expert_without_mistakes(monkeypatch):
  config = alfworld.get_config('tiny')
  config.teacher.mu_peak = 0.1
  assert config.sft.noise and not config.sft.completion_only
  rows = make_rows()

  def imitated_rows(own, text, shown):
    assert (text, shown) == ('text', 'shown')
    assert own.sft.completion_only and not own.sft.noise
    assert own.sft.data == own.sft.init == ''
    return rows

  monkeypatch.setattr(sft, 'demonstrations', lambda _: 'shown')
  monkeypatch.setattr(sft, 'imitated_rows', imitated_rows)
  assert teacher_builders.make_teacher(config, 'text').rows is rows
  assert config.sft.noise  # The config is not changed.


def _batch(mu: float) -> teacher.TeacherBatch | None:
  options = teacher.Options(mu_peak=mu, rows=4)
  return teacher.Teacher(options, make_rows(seed=1), 0).batch(3)


def _teach(mu: float, **kwargs):
  """Returns the update of SGD with rate 1: the change is the gradient."""
  subject = sgd(loss=LOSS, teacher_loss=teacher.Imitation('none'), **kwargs)
  return step(subject, make_rows(), teacher_batch=_batch(mu))


def _supervised():
  return step(sgd(loss=losses.Supervised()), _batch(1.0).rows)


def test_mu_0_is_rl_bit_for_bit():
  expected, metrics = step(sgd(loss=LOSS), make_rows())
  actual, taught = _teach(0.0)
  assert_trees_close(actual.params, expected.params, 0)
  assert {name: taught[name] for name in metrics} == metrics
  assert taught['teacher/tokens'] == 0


def test_mu_1_is_supervised_learning():
  expected, metrics = _supervised()
  actual, taught = _teach(1.0)
  assert_trees_close(actual.params, expected.params, 1e-7)
  assert taught['teacher/loss'] == pytest.approx(metrics['loss/total'])
  assert taught['teacher/tokens'] == metrics['update/tokens']
  # No token of RL is trained, so that there are no means over them.
  assert taught['update/tokens'] == 0
  assert not {'loss/entropy', 'loss/total', 'ratio/max'} & taught.keys()


def test_dropped_tokens_of_the_teacher_s_rows_are_not_trained():
  taught = _batch(1.0)
  mask = taught.rows.completion_mask
  trained = mask & (np.arange(mask.shape[1]) % 2 == 0)
  expected, metrics = step(
    sgd(loss=losses.Supervised()), taught.rows, trained=trained
  )
  taught = dataclasses.replace(taught, trained=trained)
  subject = sgd(loss=LOSS, teacher_loss=teacher.Imitation('none'))
  actual, values = step(subject, make_rows(), teacher_batch=taught)
  assert_trees_close(actual.params, expected.params, 1e-7)
  assert values['teacher/tokens'] == metrics['update/tokens'] == trained.sum()


def test_gradients_are_added_with_their_weights():
  rl, rl_metrics = step(sgd(loss=LOSS), make_rows())
  sft, _ = _supervised()
  actual, metrics = _teach(0.3)
  expected = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, rl.params, sft.params)
  assert_trees_close(actual.params, expected, 1e-6)
  # The metrics of RL are those without a teacher.
  for name in ('loss/total', 'loss/entropy', 'ratio/mean', 'update/tokens'):
    assert metrics[name] == rl_metrics[name]


def test_every_minibatch_gets_a_share_of_the_rows():
  _, metrics = _teach(0.3, minibatch_rows=4)
  _, whole = _teach(0.3)
  assert (metrics['update/count'], whole['update/count']) == (2, 1)
  assert metrics['teacher/tokens'] == whole['teacher/tokens'] > 0


def test_padding_of_the_teacher_takes_no_share():
  taught = teacher.TeacherBatch(make_rows(seed=1), 0.5)  # 8 rows and padding
  subject = sgd(loss=LOSS, teacher_loss=teacher.Imitation('none'))
  shares = [subject._teacher_part(taught, n, 2)[2].tolist() for n in range(2)]
  assert shares == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_minibatches_without_rows_of_the_teacher_are_rl():
  one = _batch(1.0)
  one = dataclasses.replace(one, rows=one.rows.take(np.array([0])))
  subject = sgd(
    loss=LOSS, teacher_loss=teacher.Imitation('none'), minibatch_rows=4
  )
  _, metrics = step(subject, make_rows(), teacher_batch=one)
  # The first of two mini-batches has the teacher's row, with weight 1.
  assert metrics['update/count'] == 2 and metrics['teacher/tokens'] > 0
  assert metrics['update/tokens'] > 0


def test_replayed_ratios_by_hand():
  # Behaviour .25 and policy .5: ratio 2, clipped at 1.2 for A > 0 only.
  options = teacher.Options(mu_peak=1.0, loss='replay')
  config = alfworld.get_config('mini').loss.to_dict()
  others = {'entropy_weight': 0.7, 'kl_weight': 0.1}
  loss = teacher.make_loss(options, config | others)
  log_probs = jnp.log(jnp.array([[0.5, 0.5, 0.25, 0.9]]))
  outputs = token_batch.PolicyOutputs(log_probs, jnp.ones_like(log_probs))
  mask = jnp.array([[True, True, True, False]])
  columns = {
    'advantages': jnp.array([[1.0, -1.0, 3.0, 9.0]]),
    'old_log_probs': jnp.log(jnp.full((1, 4), 0.25)),
    'importance': jnp.ones((1, 4)),
  }
  assert set(loss.columns) == set(columns)
  tokens = token_batch.make(mask, jnp.zeros((1, 4), int), columns)
  np.testing.assert_allclose(
    loss(outputs, tokens)[0], [[-1.2, 2.0, -3.0, 0.0]], atol=1e-6
  )


def test_distillation_has_ratios_of_tokens():
  options = teacher.Options(mu_peak=0.1, loss='distillation')
  config = alfworld.get_config('tiny').loss.to_dict()
  rows = {'ratio_level': 'row', 'clip_epsilon': 3e-4, 'clip_epsilon_high': 4e-4}
  loss = teacher.make_loss(options, config | rows)
  assert (loss.ratio_level, loss.clip_epsilon) == ('token', 0.2)
  assert loss.clip_epsilon_high is None
  loss = teacher.make_loss(options, config | {'clip_epsilon': 0.1})
  assert loss.clip_epsilon == 0.1


@pytest.mark.slow
def test_replay_with_mu_1_is_rl_on_the_recorded_rows():
  rows, others = make_rows(seed=1), make_rows()
  advantages = np.linspace(-1, 1, len(rows.groups), dtype=np.float32)
  columns = teacher.surrogate_columns(advantages, rows.sampler_log_probs)
  options = teacher.Options(mu_peak=1.0, loss='replay')
  subject = sgd(loss=LOSS, teacher_loss=PLAIN)
  replayed = teacher.Teacher(options, rows, 0, PLAIN, columns)
  actual, metrics = step(subject, others, teacher_batch=replayed.batch(0))
  expected, plain = step(sgd(loss=PLAIN), rows, advantages=advantages)
  assert_trees_close(actual.params, expected.params, 1e-7)
  assert metrics['teacher/loss'] == pytest.approx(plain['loss/total'], abs=1e-6)


def test_columns_follow_the_chosen_rows():
  rows = make_rows(seed=1)
  options = teacher.Options(mu_peak=1.0, loss='replay', rows=3)
  columns = {'advantages': rows.lengths.astype(np.float32)}
  for iteration in range(5):
    taught = teacher.Teacher(options, rows, 0, PLAIN, columns).batch(iteration)
    np.testing.assert_array_equal(
      taught.columns['advantages'], taught.rows.lengths
    )


def test_batches_depend_on_seed_and_iteration_only():
  options = teacher.Options(mu_peak=0.1, rows=4)

  def lengths(seed: int) -> list[list[int]]:
    subject = teacher.Teacher(options, make_rows(seed=1), seed)
    return [subject.batch(n).rows.lengths.tolist() for n in range(9)]

  draws = lengths(5)
  assert draws == lengths(5) != lengths(6)
  assert len({*map(tuple, draws)}) > 3
  assert all(len(draw) == 4 and min(draw) > 0 for draw in draws)


def test_without_a_teacher_there_is_no_batch():
  options = teacher.Options()
  assert teacher.make_loss(options, {}) is None
  assert teacher.Teacher(options, None, 0).batch(0) is None
  on = teacher.Options(mu_peak=0.1)
  assert teacher.make_loss(on, {}) == teacher.Imitation('phi')
  assert teacher.Teacher(on, make_rows(), 0).batch(0).weight == 0.1


@pytest.mark.parametrize(
  ('changes', 'line'),
  [
    ({'teacher.mu_peak': 1.5}, 'teacher.mu_peak=1.5: out of range'),
    (
      {'teacher.mu_peak': 0.1, 'teacher.mu_valley': 0.2},
      'teacher.mu_valley=0.2: above mu_peak=0.1; must be at most that',
    ),
    (
      {'teacher.rows': 8},
      'teacher.rows=8: has no effect; needs teacher.mu_peak to be above 0',
    ),
    (
      {'teacher.mu_peak': 0.1, 'teacher.token_weight': 'p'},
      'teacher.token_weight=p: unknown; must be one of phi, none',
    ),
    (
      {'teacher.mu_peak': 0.1, 'teacher.data': '/nowhere'},
      'teacher.data=/nowhere: holds no episodes',
    ),
    (
      {'teacher.mu_peak': 0.1, 'teacher.loss': 'replay'},
      'teacher.data=: teacher.loss=replay needs a folder of episodes',
    ),
    (
      {
        'teacher.mu_peak': 0.1,
        'teacher.loss': 'replay',
        'teacher.token_weight': 'none',
      },
      'teacher.token_weight=none: teacher.loss=replay has no such option',
    ),
    (
      {
        'teacher.mu_peak': 0.1,
        'teacher.loss': 'distillation',
        'teacher.data': 'x',
      },
      'teacher.data=x: teacher.loss=distillation teaches with the iteration',
    ),
    (
      {
        'teacher.mu_peak': 0.1,
        'teacher.loss': 'distillation',
        'env.context': 'conversation',
      },
      'env.context=conversation: teacher.loss=distillation adds',
    ),
  ],
)
def test_refused_options(changes, line):
  config = alfworld.get_config('mini')
  config.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=line):
    config_lib.validate(config)


def test_an_environment_without_an_expert_is_refused():
  config = alfworld.get_config('mini')
  config.teacher.mu_peak = 0.1
  assert not list(teacher.conflicts(config))
  config.env.name = 'toy'
  with pytest.raises(ValueError, match='teacher.mu_peak=0.1: env.name=toy has'):
    config_lib.validate(config, needs_model=False)
  config.teacher.loss = 'distillation'
  (line,) = teacher.conflicts(config)
  assert line.endswith('has no expert; must be 0')


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_with_the_expert_and_with_recorded_episodes(tmp_path):
  flags = ('--config.teacher.mu_peak=0.5', '--config.teacher.rows=8')
  schedule = (
    '--config.teacher.warmup_iterations=1',
    '--config.teacher.num_episodes=4',
  )
  first = tmp_path / 'first'
  programs.run(small_runs.small(first, *flags, *schedule))
  # mu is 0 in the first iteration.
  tokens = [x['teacher/tokens'] for x in small_runs.read_lines(first)[:3]]
  assert tokens[0] == 0 < min(tokens[1:])
  assert episodes.open_dataset(first / 'teacher').iterations == [1, 2]
  won = any(episode['success'] for episode in small_runs.read_episodes(first))
  data = f'--config.teacher.data={first / "episodes"}'
  for loss in ('imitation', 'replay'):
    second = tmp_path / loss
    which = f'--config.teacher.loss={loss}'
    command = small_runs.small(second, *flags, data, which)
    if won:
      programs.run(command)
      lines = small_runs.read_lines(second)[:3]
      assert all(line['teacher/tokens'] > 0 for line in lines)
    else:
      with pytest.raises(AssertionError, match='teacher.data=.*no episode of'):
        programs.run(command)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_distillation_resumes_exactly(tmp_path):
  flags = (
    '--config.teacher.mu_peak=0.5',
    '--config.teacher.loss=distillation',
    '--config.rollout.max_prompt_tokens=400',
  )
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  programs.run(small_runs.small(whole, *flags))
  programs.run(small_runs.small(parts, *flags, '--config.num_iterations=1'))
  programs.run(small_runs.small(parts, *flags))
  small_runs.assert_same_end(parts, whole)
  stored = [[*episodes.open_dataset(x / 'teacher')] for x in (parts, whole)]
  np.testing.assert_equal(*stored)
  lines = small_runs.read_lines(whole)[:3]
  assert all(line['teacher/tokens'] > 0 for line in lines)
