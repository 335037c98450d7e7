"""Tests of the generated parts of docs/results.md and README.md."""

import re
import sys

import numpy as np
import pytest

from gigpo_jax.tools import law, outcomes, paired, results, sweep_table


@pytest.mark.parametrize('path', results.PAGES, ids=lambda path: path.name)
def test_the_page_is_current(path):
  text = path.read_text(encoding='utf-8')
  assert '<!-- begin ' in text
  assert text == results.with_blocks(text), (
    'run python -m gigpo_jax.tools.results'
  )


def test_every_block_is_on_a_page():
  text = ''.join(path.read_text(encoding='utf-8') for path in results.PAGES)
  begun = re.findall(r'<!-- begin (\w+) -->', text)
  assert sorted(begun) == sorted(results.BLOCKS)
  assert re.findall(r'<!-- end (\w+) -->', text) == begun


def test_only_blocks_are_replaced(monkeypatch):
  monkeypatch.setattr(results, 'BLOCKS', {'one': lambda: '| x |'})
  text = 'a\n<!-- begin one -->\nold\n<!-- end one -->\nb\n'
  expected = 'a\n<!-- begin one -->\n\n| x |\n\n<!-- end one -->\nb\n'
  assert results.with_blocks(text) == expected
  assert results.with_blocks(expected) == expected
  with pytest.raises(ValueError, match='block two: unknown; must be one of on'):
    results.with_blocks(text.replace('one', 'two'))


def test_runs_on_a_gpu_join_the_table(tmp_path, monkeypatch):
  for name in ('credit', 'credit_tests'):
    with (results.PROJECT / f'docs/results/{name}.csv').open() as file:
      lines = [next(file)]
      lines += [x for x in file if x.startswith(('sokoban,g', '"configs'))]
    (tmp_path / f'{name}.csv').write_text(''.join(lines))
  monkeypatch.setattr(results, '_FOLDER', tmp_path)
  for name in ('_tests', '_evaluations'):
    monkeypatch.setattr(results, name, getattr(results, name).__wrapped__)
  before = results.credit_block()
  assert 'alfworld small' not in before
  for end in ('', '_tests'):
    text = (tmp_path / f'credit{end}.csv').read_text()
    text = text.replace('sokoban,', 'alfworld small,')
    (tmp_path / f'small{end}.csv').write_text(text)
  added = results.credit_block().removeprefix(before)
  rows = before.splitlines()[4:]
  assert added.strip().splitlines() == [
    row.replace('sokoban', 'alfworld small') for row in rows
  ]


def test_the_dial_compares_methods_with_grpo_by_setting():
  tests = {
    name: {s: outcomes.Result('keydoor', name, s, 4, r) for s, r in rates}
    for name, rates in (
      ('gigpo', [(0, 0.5), (1, 0.75)]),
      ('grpo', [(0, 0.25), (1, 0.25)]),
      ('g2po', [(0, 0.5), (1, 0.25)]),
      ('alias held gigpo', [(0, 0.5)]),
      ('traps 0 gigpo', [(0, 0.5)]),  # No pair.
    )
  }
  values = dict(zip(law.PREDICTORS, (0.2, 12.25, 0.4, 0.05, 0.5), strict=True))
  settings = 'keydoor', 'keydoor alias held'
  table = results.dial_table(tests, dict.fromkeys(settings, values))
  rows = [line.strip('| ').split(' | ') for line in table.splitlines()[2:]]
  start = ['20.0%', '12.2', '40.0%', '5.0%', '0.50']
  names = 'keydoor', 'alias held'
  assert [row[:6] for row in rows] == [[name, *start] for name in names]
  assert rows[0][6:9] == ['25.0', '62.5', '37.5']
  assert rows[1][6:9] == ['25.0', '50.0', '–']
  # Differences 25 and 50, and 25 and 0.
  assert rows[0][9].startswith('+37.5')
  assert rows[0][10].startswith('+12.5')
  assert rows[1][9].startswith('+25.0')
  assert rows[1][10] == '–'
  tests['gigpo'][1] = outcomes.Result('keydoor', 'gigpo', 1, 8, 0.75)
  with pytest.raises(ValueError, match='gigpo, seed 1: has other test tasks'):
    results.dial_table(tests, dict.fromkeys(settings, values))


def _row(name, seed, iteration, rate, steps=0.0, **known):
  row = dict.fromkeys((*sweep_table.COLUMNS, *sweep_table.MEANS))
  row |= {'experiment': 'toy', 'name': name, 'seed': seed}
  row |= {'spent/env_steps': steps, 'spent/tokens': 10 * steps}
  row |= {name.replace('__', '/'): x for name, x in known.items()}
  return row | {'iteration': iteration, 'eval/success_rate': rate}


def test_the_table_by_hand():
  successes = {'grpo': [(0, 1), (0, 0)], 'gigpo': [(1, 1), (0, 1)]}
  tests = outcomes.group(
    [
      outcomes.make_result(
        ('toy', name, seed),
        {t: [bool(x)] for t, x in zip('ab', by_task, strict=True)},
      )
      for name, by_seed in successes.items()
      for seed, by_task in enumerate(by_seed)
    ]
  )
  evaluations = []
  for name, secs in (('grpo', (1, 9, 2)), ('gigpo', (4, 4, 4))):
    for seed, steps in ((0, 2000), (1, 4000)):
      evaluations.append(_row(name, seed, 0, 0.1))
      for n, x in enumerate(secs, 1):
        evaluations.append(
          _row(name, seed, n, 0.2, steps * n / 3, time__iteration_secs=x)
        )
  lines = results.credit_table(tests, evaluations).splitlines()
  # Success 25 and 75; each seed differs by 50 points. Steps: 3,000 on average.
  one, other = np.array([[1, 1], [0, 1]]), np.array([[0, 1], [0, 0]])
  gap, reverse = paired.compare(one, other), paired.compare(other, one)
  assert gap.mean == 0.5
  p, ends = f'{gap.p:.2g}', paired.interval(*paired.bootstrap(one, other))
  start = f'| toy | grpo | 2 | 25.0 |  |  | {reverse} | {p} |'
  assert lines[2] == f'{start} 3.0 | 30.0 | 2.0 |'
  start = f'|  | gigpo | 2 | 75.0 | {gap} | {p} |  |  |'
  assert lines[3] == f'{start} 3.0 | 30.0 | 4.0 |'
  lines = results.robust_table(tests).splitlines()
  assert lines[2] == '| toy | grpo | 25.0 |  |'
  assert lines[3] == f'|  | gigpo | 75.0 | {ends} |'


def test_data_are_those_of_the_first_period():
  early = {
    'train__episode_length': 8.0,
    'train__revisit_rate': 0.5,
    'advantage__singleton_anchor_rows': 0.25,
    'advantage__correlation': 0.75,
    'advantage__zero_variance_groups': 0.125,
  }
  late = dict.fromkeys(early, 1.0)
  rows = [_row('gigpo', 0, 0, 0.1), _row('gigpo', 0, 5, 0.9, **early)]
  rows += [_row('gigpo', 0, 9, 0.9, **late), _row('grpo', 0, 0, 0.3)]
  critic = early | {'advantage__correlation': None}
  rows += [_row('ppo', 0, 0, 0.2), _row('ppo', 0, 5, 0.4, **critic)]
  lines = [
    '| toy | gigpo | 1 | 10.0 % | 8.0 | 50.0% | 25.0% | 0.75 | 12.5% |',
    '|  | ppo | 1 | 20.0 % | 8.0 | 50.0% | 25.0% | – | 12.5% |',
  ]
  assert results.data_table(rows).splitlines()[2:] == lines
  # GRPO has no evaluation after the start.
  alone = results.data_table(rows, ['grpo', 'gigpo'])
  assert alone.splitlines()[2:] == lines[:1]


def test_effects_prefer_tests_to_evaluations(tmp_path):
  rows = [
    _row(name, seed, 9, rate)
    for name, rates in (('grpo', (0.2, 0.3)), ('gigpo', (0.4, 0.7)))
    for seed, rate in enumerate(rates)
  ]
  alone = [_row(n, 0, 9, 0.5) | {'experiment': 'x'} for n in ('grpo', 'gigpo')]
  effects = results.measured_effects({}, rows + alone, 'gigpo')
  assert 'x' not in effects  # A single pair has no interval.
  gap = paired.compare_seeds([0.2, 0.4])
  assert effects['toy'] == pytest.approx([100 * x for x in gap[:3]])
  tests = {
    'toy': {
      name: {
        seed: outcomes.Result('toy', name, seed, 4, rate) for seed in (0, 1)
      }
      for name, rate in (('grpo', 0.25), ('gigpo', 0.5))
    }
  }
  effects = results.measured_effects(tests, rows, 'gigpo')
  assert effects['toy'] == (25, 25, 25)
  # One pair has no interval.
  tests['toy']['grpo'].pop(1)
  effects = results.measured_effects(tests, rows, 'gigpo')
  assert effects['toy'][0] == pytest.approx(30)
  values = dict.fromkeys(law.PREDICTORS, 0.5)
  path = tmp_path / 'effects.png'
  results.draw_effects(path, {'toy': values, 'x': values}, {'gigpo': effects})
  assert path.stat().st_size > 5000


def test_the_oracle_is_drawn(tmp_path):
  cells = {'cosine': [0.3, 0.2, 0.4], 'minus gigpo': [0, 0, 0]}
  measured = {
    'one': {'methods': {'gigpo': cells, 'grpo': cells}},
    'two': {'methods': {'gigpo': cells}},
  }
  path = tmp_path / 'oracle.png'
  results.draw_oracle(path, measured)
  assert path.stat().st_size > 5000


def test_an_environment_without_a_pair_of_seeds_has_no_row(monkeypatch):
  tests = {
    'toy': {
      name: {seed: outcomes.Result('toy', name, seed, 4, 0.5)}
      for seed, name in enumerate(('grpo', 'gigpo'))
    }
  }
  monkeypatch.setattr(results, '_tests', lambda: tests)
  assert 'toy' not in results.readme_block()
  tests['toy']['gigpo'][0] = outcomes.Result('toy', 'gigpo', 0, 4, 0.75)
  assert '| toy | 50.0 (1) | 62.5 (2) | – | – | +25.0 (1) | – |' in (
    results.readme_block()
  )
  # Two pairs have no interval.
  tests['toy']['grpo'][1] = outcomes.Result('toy', 'grpo', 1, 4, 0.5)
  assert '| +12.5 (2) | – |' in results.readme_block()


def test_a_missing_page_is_one_line(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(results, 'PAGES', (tmp_path / 'results.md',))
  monkeypatch.setattr(sys, 'argv', ['results'])
  assert results.main() == 2
  error = capsys.readouterr().err
  assert 'results.md' in error and error.count('\n') == 1
