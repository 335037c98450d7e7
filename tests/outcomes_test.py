"""Tests of the outcomes of tests and of the CSV that stores them."""

import json

import numpy as np
import pytest

from gigpo_jax.tools import outcomes, sweep_table


def test_successes_of_an_evaluation(tmp_path):
  path = tmp_path / 'evaluation.json'
  episodes = [
    {'task': task, 'success': success}
    for task, success in (('a', True), ('b', True), ('a', False))
  ]
  path.write_text(json.dumps({'policies': {'p': {'episodes': episodes}}}))
  assert outcomes.read_evaluation(path) == {'a': [True, False], 'b': [True]}


def test_bits_by_hand():
  # Tasks in the order of their names: 1 of 2, 0 of 2, 2 of 2: 10 00 11.
  by_task = {'b': [False, False], 'a': [False, True], 'c': [True, True]}
  result = outcomes.make_result(('toy', 'gigpo', 3), by_task)
  assert outcomes.encode(result) == '8c'
  assert (result.tasks, result.episodes, result.success) == (3, 6, 0.5)
  assert result.outcomes_T.tolist() == [0.5, 0, 1]
  # Tasks that do not have the same number of episodes are not stored.
  uneven = outcomes.make_result(('', '', 0), {'a': [True], 'b': [True, False]})
  assert outcomes.encode(uneven) == '' and uneven.success == 0.75
  by_task = {'a': [True], 'b': [True, False, False]}
  assert outcomes.encode(outcomes.make_result(('', '', 0), by_task)) == ''


@pytest.mark.parametrize('repeats', [1, 3])
def test_stored_results_are_equal(tmp_path, repeats):
  rng = np.random.default_rng(repeats)
  results = [
    outcomes.make_result(
      ('toy', name, seed),
      {str(t): (rng.random(repeats) < 0.4).tolist() for t in range(21)},
    )
    for name in ('grpo', 'gigpo')
    for seed in (0, 1)
  ]
  path = tmp_path / 'x_tests.csv'
  outcomes.write(path, results)
  read = outcomes.read(path)
  for one, other in zip(results, read, strict=True):
    assert one.key == other.key and one.task_list == other.task_list
    assert one.success == other.success
    np.testing.assert_allclose(one.outcomes_T, other.outcomes_T)
  assert list(outcomes.group(read)['toy']['gigpo']) == [0, 1]


def test_tables_of_earlier_releases_have_no_outcomes(tmp_path):
  path = tmp_path / 'x_tests.csv'
  path.write_text('experiment,name,seed,tasks,success\nalfworld,a,1,512,0.5\n')
  (result,) = outcomes.read(path)
  assert (result.success, result.outcomes_T, result.task_list) == (
    0.5,
    None,
    '',
  )
  for damaged in ('experiment,name\na,b\n', path.read_text() + 'a,b,c,4,0.5\n'):
    path.write_text(damaged)
    with pytest.raises(ValueError, match='not a table of tests') as error:
      outcomes.read(path)
    assert '\n' not in str(error.value)
  header = ','.join(outcomes.COLUMNS)
  path.write_text(f'{header}\ntoy,a,0,9,0.5,9,x,,ff\n')
  with pytest.raises(ValueError, match='1 bytes of outcomes, 9 episodes'):
    outcomes.read(path)


def test_damaged_tables_are_refused_in_one_line(tmp_path):
  path = tmp_path / 'x_tests.csv'
  line = 'toy,gigpo,3,4,0.5\n'
  path.write_text('experiment,name,seed,tasks,success\n' + 2 * line)
  with pytest.raises(ValueError) as error:
    outcomes.read(path)
  assert str(error.value) == (
    f'{path}: toy, gigpo, seed 3: has 2 lines; must be one'
  )
  # The csv module refuses long fields, as JSON files have, by its own error.
  path.write_text('{"episodes": "' + 'x' * 200_000)
  with pytest.raises(ValueError, match='not a table of tests') as error:
    outcomes.read(path)
  assert len(str(error.value)) < 400 and '\n' not in str(error.value)


def test_tables_that_are_cut_in_a_line_are_refused(tmp_path):
  path = tmp_path / 'x_tests.csv'
  by_task = {str(t): [t % 3 == 0] for t in range(21)}
  outcomes.write(path, [outcomes.make_result(('toy', 'a', 0), by_task, 's')])
  table = tmp_path / 'x.csv'
  sweep_table.write(
    table,
    [
      {'experiment': 'toy', 'name': 'a', 'seed': 0, 'iteration': 4}
      | dict.fromkeys(('eval/success_rate', *sweep_table.MEANS), 0.5)
    ],
  )
  for file, read in ((path, outcomes.read), (table, sweep_table.read)):
    text = file.read_bytes()
    assert len(read(file)) == 1
    for end in range(text.index(b'\n') + 2, len(text)):
      file.write_bytes(text[:end])
      with pytest.raises(ValueError, match='the end is missing') as error:
        read(file)
      assert '\n' not in str(error.value)
    # Lines with fewer and with more fields.
    for line in (text.rpartition(b',')[0] + b'\n', text[:-2] + b',1\n'):
      file.write_bytes(line)
      with pytest.raises(ValueError, match='line 2 does not have'):
        read(file)
