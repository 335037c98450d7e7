"""Tests of self-distillation with solutions in prompts."""

import dataclasses
import types

import numpy as np
import pytest

from configs import alfworld
from envs import base
from gigpo_jax import batch, privileged, teacher, tokenizer, trajectory
from gigpo_jax.run import teacher_builders, update_inputs

HEAD = 2
PLANS = {0: [50, 51], 1: [60, 61, 62, 63]}


def _context() -> privileged.PrivilegedContext:
  """Returns a context whose solution is the index of a task."""

  def encode(texts):
    plans = [text.split('\n')[1] for text in texts]
    return [np.array(PLANS[int(plan)], np.int32) for plan in plans]

  return privileged.PrivilegedContext(
    encode, HEAD, lambda task: str(task.index)
  )


def _episodes():
  return [
    trajectory.Trajectory(base.Task('train', n), 'type', n, 0, ())
    for n in (0, 1)
  ]


def _rows(row_multiple=4) -> batch.Rows:
  prompts = [[1, 2, 3, 4, 9], [1, 2, 3, 9], [1, 2, 5, 6, 9]]
  completions = [[20, 21], [22], [23, 24, 25]]
  rows = batch.pack(
    [np.array(p, np.int32) for p in prompts],
    [np.array(c, np.int32) for c in completions],
    max_prompt_tokens=8,
    max_completion_tokens=3,
    row_multiple=row_multiple,
  )
  rows.episodes[:3] = rows.groups[:3] = [0, 1, 1]
  return rows


def test_the_solution_follows_the_head_of_the_template():
  rows = _rows()
  scored = _context().make_rows(rows, _episodes())
  tokens = [list(scored.tokens[r, : scored.lengths[r]]) for r in range(3)]
  assert tokens[0] == [1, 2, 50, 51, 3, 4, 9, 20, 21]
  assert tokens[1] == [1, 2, 60, 61, 62, 63, 3, 9, 22]
  # 5 + 4 tokens exceed the limit of 8.
  assert tokens[2] == []
  np.testing.assert_array_equal(scored.real, [True, True, False, False])
  np.testing.assert_array_equal(scored.groups[:2], rows.groups[:2])
  np.testing.assert_array_equal(scored.prompt_lengths, [7, 8, 0, 0])
  assert scored.tokens.shape == rows.tokens.shape
  # Completions stay where the log-probs are compared.
  same = scored.completion_mask == rows.completion_mask
  assert same[:2].all()


def test_a_row_without_a_solution_is_padding():
  context = dataclasses.replace(
    _context(), solve=lambda task: '0' if task.index == 0 else ''
  )
  scored = context.make_rows(_rows(), _episodes())
  np.testing.assert_array_equal(scored.real, [True, False, False, False])


def test_advantages_by_hand():
  # log(.5 / .25) = log 2, log(.1 / .2) = -log 2; past the completion 0.
  solved = np.log(np.array([[0.5, 0.1, 1.0]], np.float32))
  plain = np.log(np.array([[0.25, 0.2, 0.5]], np.float32))
  mask = np.array([[True, True, False]])
  actual = privileged.advantages(solved, plain, mask)
  np.testing.assert_allclose(actual, [[np.log(2), -np.log(2), 0]], atol=1e-6)


def _parts(mu: float, context=None, rows=8, old_log_probs='learner'):
  """Returns parts of a run; a token's log-prob is minus the prompt's length."""

  def log_probs(params, scored):
    assert params == 'params' and scored.real.all()
    lengths = scored.prompt_lengths[:, None].astype(np.float32)
    return np.where(scored.completion_mask, -lengths, 0)

  options = teacher.Options(mu_peak=mu, loss='distillation', rows=rows)
  return types.SimpleNamespace(
    teacher=teacher.Teacher(options, None, 0),
    privileged_context=context,
    config=types.SimpleNamespace(
      loss=types.SimpleNamespace(old_log_probs=old_log_probs)
    ),
    learner=types.SimpleNamespace(log_probs=log_probs),
  )


def _columns(old, importance=1.0):
  return {'old_log_probs': old, 'importance': importance}


def _batch(*args, **kwargs) -> teacher.TeacherBatch | None:
  rows = _rows()
  old = np.where(rows.completion_mask, -1.0, 0).astype(np.float32)
  state = types.SimpleNamespace(policy=types.SimpleNamespace(params='params'))
  return update_inputs.make_teacher_batch(
    _parts(*args, **kwargs), state, rows, _episodes(), _columns(old), 0
  )


def test_batches_are_the_plain_rows():
  taught = _batch(0.25, _context())
  assert taught.weight == 0.25
  rows = _rows()
  np.testing.assert_array_equal(taught.rows.tokens, rows.tokens[:2])
  # Privileged prompts of 7 and 8 tokens: -7 + 1 and -8 + 1.
  np.testing.assert_array_equal(
    taught.columns['advantages'], [[-6, -6, 0], [-7, 0, 0]]
  )
  np.testing.assert_array_equal(
    taught.columns['old_log_probs'], [[-1, -1, 0], [-1, 0, 0]]
  )
  assert _batch(0.0, _context()) is None
  assert _batch(0.25) is None


@pytest.mark.parametrize('old_log_probs', ['sampler', 'auto'])
def test_advantages_do_not_depend_on_the_samplers_log_probs(old_log_probs):
  taught = _batch(0.25, _context(), old_log_probs=old_log_probs)
  # The prompts of 2 and 2 tokens are as the learner scores them.
  plain = _rows().prompt_lengths[:2]
  np.testing.assert_array_equal(
    taught.columns['advantages'],
    [[plain[0] - 7.0, plain[0] - 7.0, 0], [plain[1] - 8.0, 0, 0]],
  )
  np.testing.assert_array_equal(
    taught.columns['old_log_probs'], [[-1, -1, 0], [-1, 0, 0]]
  )


def test_a_batch_has_the_trained_tokens_of_its_rows():
  rows, old = _rows(), np.zeros(_rows().completion_mask.shape, np.float32)
  trained = rows.completion_mask & (np.arange(old.shape[1]) > 0)
  weights = np.arange(old.size, dtype=np.float32).reshape(old.shape)
  columns = _columns(old, weights)
  state = types.SimpleNamespace(policy=types.SimpleNamespace(params='params'))
  taught = update_inputs.make_teacher_batch(
    _parts(0.25, _context()), state, rows, _episodes(), columns, 0, trained
  )
  np.testing.assert_array_equal(taught.trained, trained[:2])
  # Tokens of an earlier policy count as in the loss of their rows.
  np.testing.assert_array_equal(
    taught.columns['importance'], columns['importance'][:2]
  )


def test_without_room_there_is_no_batch(monkeypatch):
  monkeypatch.setitem(PLANS, 0, list(range(9)))
  monkeypatch.setitem(PLANS, 1, list(range(9)))
  assert _batch(0.25, _context()) is None


def test_the_solution_is_the_expert_s_play():
  config = alfworld.get_config('tiny')
  text = tokenizer.Tokenizer('configs/warm_starts/alfworld_tiny')
  assert teacher_builders.make_privileged_context(config, text) is None
  config.teacher.mu_peak, config.teacher.loss = 0.1, 'distillation'
  context = teacher_builders.make_privileged_context(config, text)
  solution = context.solve(base.Task('train', 0))
  assert solution == context.solve(base.Task('train', 0))
  assert '</action>' in solution.splitlines()[0]
  (ids,) = text.render(['x'])
  assert text.decode([ids[: context.head]])[0].endswith('user\n')


def test_prompts_without_room_for_any_solution_are_refused():
  config = alfworld.get_config('tiny')
  text = tokenizer.Tokenizer('configs/warm_starts/alfworld_tiny')
  config.teacher.mu_peak, config.teacher.loss = 0.1, 'distillation'
  config.rollout.max_prompt_tokens = 200
  with pytest.raises(ValueError, match='max_prompt_tokens=200: .* at least'):
    teacher_builders.make_privileged_context(config, text)
