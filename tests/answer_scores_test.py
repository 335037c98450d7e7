"""Tests of the probability of the reference answer before a turn."""

import math
import types

import numpy as np
import preloaded
import pytest
import small_runs

import envs
from configs import search_qa
from envs import base
from gigpo_jax import answer_scores, batch, builders, trajectory
from gigpo_jax import config as config_lib
from gigpo_jax.run import update_inputs

TASKS = [base.Task('train', 0), base.Task('train', 1)]
ANSWERS = {TASKS[0]: 'ab', TASKS[1]: 'abcdefgh'}


def _scorer():
  return answer_scores.AnswerScorer(
    lambda texts: [np.array([ord(c) for c in text]) for text in texts],
    '<',
    ANSWERS.__getitem__,
  )


def _episode(task):
  return trajectory.Trajectory(task, 'type', 0, 0, ())


def _rows():
  return batch.pack(
    [np.array([1, 2]), np.array([3])],
    [np.array([7, 7, 7]), np.array([8])],
    max_prompt_tokens=2,
    max_completion_tokens=4,
    row_multiple=3,
  )


def test_rows_hold_the_answer_after_each_prompt():
  rows = _rows()
  scored, mask = _scorer().make_rows(rows, [_episode(t) for t in TASKS])
  text = [scored.tokens[r, : scored.lengths[r]].tolist() for r in range(3)]
  # The second answer is cut after four tokens.
  assert text == [[1, 2, *b'<ab'], [3, *b'<abc'], []]
  assert mask.tolist() == [
    [False, True, True, False],
    [False, True, True, True],
    [False] * 4,
  ]
  assert scored.tokens.shape == rows.tokens.shape
  assert rows.lengths.tolist() == [5, 2, 0]  # Not changed.
  np.testing.assert_array_equal(rows.tokens, _rows().tokens)


def test_each_token_of_a_text_without_a_start_counts():
  texts = ['ab', None, None]
  scored, mask = answer_scores.respond(_rows(), texts, _scorer().encode)
  assert scored.tokens[0, :4].tolist() == [1, 2, *b'ab']
  assert scored.lengths.tolist() == [4, 2, 0]
  assert mask.tolist() == [[True, True, False, False], *[[False] * 4] * 2]


def test_rows_get_the_probability_of_their_answer():
  rows = _rows()

  def log_probs(params, scored):
    # The policy is surer after a longer prompt.
    assert params == 'params'
    each = np.log(scored.prompt_lengths[:, None] / 4 + 1e-9)
    return np.where(scored.completion_mask, each, 0).astype(np.float32)

  found, _ = update_inputs.score_texts(
    types.SimpleNamespace(
      answer_scorer=_scorer(),
      scored_rewards=None,
      learner=types.SimpleNamespace(log_probs=log_probs),
    ),
    types.SimpleNamespace(policy=types.SimpleNamespace(params='params')),
    rows,
    [_episode(task) for task in TASKS],
  )
  np.testing.assert_allclose(found.state_values, [0.5, 0.25, np.nan], rtol=1e-5)


def test_probabilities_by_hand():
  # exp((log .5 + log .125) / 2) = .25; the start of the response is masked.
  log_probs = np.log(np.array([[0.9, 0.5, 0.125], [0.9, 0.9, 0.9]]))
  mask = np.array([[False, True, True], [False] * 3])
  found = answer_scores.probabilities(log_probs, mask)
  assert found[0] == pytest.approx(0.25)
  assert math.isnan(found[1])


def test_the_answer_of_a_question_succeeds():
  config = search_qa.get_config('smoke')
  scorer = builders.make_answer_scorer(config, list)
  options = config_lib.env_kwargs(config)
  env = envs.make(config.env.name, **options)
  task = base.Task('train', 3)
  env.reset(task)
  result = env.step(f'{scorer.start}{scorer.answer(task)}</answer>')
  env.close()
  assert result.success and result.valid


def test_other_environments_are_refused():
  config = search_qa.get_config('smoke,igpo')
  config_lib.validate(config, needs_model=False)
  config.env.name = 'toy'
  with pytest.raises(ValueError, match='env.name=toy: its tasks have no ref'):
    config_lib.validate(config, needs_model=False)


@pytest.mark.slow
def test_a_resumed_run_equals_a_whole_run(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'

  def run(workdir, *more):
    command = small_runs.command(
      'train',
      '--config=configs/search_qa.py:smoke,igpo',
      f'--workdir={workdir}',
      '--config.model.path=configs/warm_starts/alfworld_tiny',
      '--config.num_iterations=2',
      '--config.evaluation.every=0',
      '--config.rollout.groups=2',
      *more,
    )
    return preloaded.run(command)

  run(whole)
  run(parts, '--config.num_iterations=1')
  assert 'resuming' in run(parts)
  small_runs.assert_same_end(parts, whole)
