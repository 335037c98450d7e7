"""Tests of the law of step advantages, and of the advice from it."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from gigpo_jax.tools import advise, law, outcomes, sweep_table

REVISITS = 'train/revisit_rate'
CORRELATION = 'advantage/correlation'


def write_table(path, runs):
  """Writes (experiment, name, seed, success) as the CSV of a sweep."""
  rows = [
    {'experiment': experiment, 'name': name, 'seed': seed}
    | {'iteration': iteration, 'eval/success_rate': rate}
    for experiment, name, seed, success in runs
    for iteration, rate in ((0, 0.1), (9, success))
  ]
  sweep_table.write(path, rows)


def predictors(seed, **known):
  rng = np.random.default_rng(seed)
  return {name: rng.random() for name in law.PREDICTORS} | known


def test_effects_are_paired_by_seed(tmp_path):
  runs = [
    ('keydoor', 'mini gigpo', 0, 0.50),
    ('keydoor', 'mini gigpo', 1, 0.62),
    ('keydoor', 'mini gigpo', 2, 0.9),  # GRPO has no seed 2.
    ('keydoor', 'mini grpo', 1, 0.52),
    ('keydoor', 'mini grpo', 0, 0.46),
    ('webshop', 'gigpo', 0, 0.6),
    ('webshop', 'grpo', 0, 0.7),
    ('sokoban', 'gigpo', 0, 0.7),
  ]
  write_table(tmp_path / 't.csv', runs)
  found = law.effects(sweep_table.read(tmp_path / 't.csv'))
  # Differences 4 and 10: their standard deviation is 3 sqrt(2).
  assert found['keydoor mini'] == pytest.approx((7, 3, 2))
  assert found['webshop'][0] == pytest.approx(-10)
  assert math.isnan(found['webshop'].error) and 'sokoban' not in found


def test_settings_with_hidden_anchors_share_the_runs_of_grpo():
  results = {
    ('keydoor', 'gigpo'): 1,
    ('keydoor', 'grpo'): 2,
    ('keydoor', 'alias held gigpo'): 3,
    ('keydoor', 'traps 0 gigpo'): 4,
    ('sokoban', 'alias held gigpo'): 5,
  }
  assert law.by_setting(results) == {
    'keydoor': {'gigpo': 1, 'grpo': 2},
    'keydoor alias held': {'gigpo': 3, 'grpo': 2},
    'keydoor traps 0': {'gigpo': 4},
    'sokoban alias held': {'gigpo': 5},
  }


def test_tests_replace_evaluations(tmp_path):
  runs = [
    (env, name, seed, rate)
    for env in ('alfworld', 'webshop')
    for name, rate in (('grpo', 0.3), ('gigpo', 0.5))
    for seed in (0, 1)
  ]
  path = str(tmp_path / 't.csv')
  write_table(path, runs)
  assert law.read_effects(path)['webshop'].mean == pytest.approx(20)
  tests = [
    outcomes.Result('alfworld', name, seed, 4, rate)
    for name, rates in (('grpo', (0.25, 0.5)), ('gigpo', (0.5, 1.0)))
    for seed, rate in enumerate(rates)
  ]
  # A single pair is no reason to ignore the evaluations of two.
  single = [outcomes.Result('webshop', n, 0, 4, 0.5) for n in ('grpo', 'gigpo')]
  outcomes.write(tmp_path / 't_tests.csv', [*tests, *single])
  found = law.read_effects(path)
  assert found['webshop'].mean == pytest.approx(20)
  # Differences 25 and 50: standard error 12.5; t quantile 12.706.
  assert found['alfworld'] == pytest.approx((37.5, 12.5, 2))
  ends = (37.5 - 12.706 * 12.5, 37.5 + 12.706 * 12.5)
  assert found['alfworld'].interval == pytest.approx(ends, rel=1e-4)


def test_the_best_method_is_chosen_on_other_seeds(tmp_path):
  # On seed 1 alone `b` is best, on seed 0 alone `a`: each is taken on the
  # seed on which it is worse.
  rates = {'a': (0.8, 0.5), 'b': (0.6, 0.9), 'grpo': (0.4, 0.4)}
  runs = [
    ('toy', name, n, x) for name in rates for n, x in enumerate(rates[name])
  ]
  write_table(tmp_path / 't.csv', runs)
  found = law.effects(sweep_table.read(tmp_path / 't.csv'), law.BEST)
  assert found['toy'] == pytest.approx((15, 5, 2))
  # A method of a single seed has no others that could select it.
  write_table(tmp_path / 't.csv', [('toy', 'single', 0, 0.9), *runs])
  rows = sweep_table.read(tmp_path / 't.csv')
  assert law.effects(rows, law.BEST) == found


def test_the_best_method_has_the_largest_gain_not_the_easiest_seeds(tmp_path):
  # Seeds 2 and 3 are hard, and `b` has not played them.
  rates = {
    'grpo': (0.4, 0.4, 0.2, 0.2),
    'a': (0.5, 0.5, 0.3, 0.3),
    'b': (0.45, 0.45),
  }
  runs = [
    ('toy', name, n, x) for name in rates for n, x in enumerate(rates[name])
  ]
  write_table(tmp_path / 't.csv', runs)
  effects = law.effects(sweep_table.read(tmp_path / 't.csv'), law.BEST)
  assert effects['toy'] == pytest.approx((10, 0, 4))


def test_names_of_runs_are_settings_and_methods():
  split = law.split_name
  assert split('keydoor', 'decoys 4 g2po') == ('keydoor decoys 4', 'g2po')
  assert split('keydoor', 'gigpo') == ('keydoor', 'gigpo')
  assert split('keydoor', 'gigpo shuffled') == ('keydoor', 'gigpo shuffled')


def test_the_only_method_of_a_setting_is_not_the_best(tmp_path):
  runs = [('toy', name, n, 0.5) for name in ('gigpo', 'grpo') for n in (0, 1)]
  write_table(tmp_path / 't.csv', runs)
  rows = sweep_table.read(tmp_path / 't.csv')
  assert law.effects(rows, law.BEST) == {} and law.effects(rows)


def test_a_law_whose_error_looks_equal_is_no_better():
  better, equal = (
    law.describe(law.Law('gigpo', 1.0, {}, error, 3.21, 5, {}))
    for error in (3.1, 3.2)
  )
  assert '(better than' in better and 'NO better' in equal


def test_the_interval_of_a_prediction_by_hand():
  # Student's t with 4 - 1 - 1 = 2 degrees of freedom: 4.303.
  fitted = law.Law('gigpo', 1.0, {REVISITS: 2.0}, 3.0, 4.0, 4, {})
  assert fitted.half_width == pytest.approx(3 * 4.303, rel=1e-4)


def test_leave_one_out_errors():
  # Without predictors: 0 - 4.5, 3 - 3 and 6 - 1.5.
  y = np.array([0.0, 3.0, 6.0])
  line, error = law._fit_line(np.zeros((3, 0)), y, np.arange(3))
  assert line == pytest.approx([3]) and error == pytest.approx(math.sqrt(13.5))
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(7, 2)), rng.normal(size=7)
  gaps = []
  for n in range(7):
    rest = np.arange(7) != n
    design = np.column_stack([np.ones(6), x[rest]])
    slopes = np.linalg.lstsq(design, y[rest], rcond=None)[0]
    gaps.append(y[n] - [1, *x[n]] @ slopes)
  _, error = law._fit_line(x, y, np.arange(7))
  assert error == pytest.approx(math.sqrt(np.mean(np.square(gaps))))
  # Settings of a group are left out together: 0 and 3 minus 6, 6 minus 1.5.
  _, error = law._fit_line(
    np.zeros((3, 0)), np.array([0.0, 3.0, 6.0]), np.array([0, 0, 2])
  )
  assert error == pytest.approx(math.sqrt((36 + 9 + 4.5**2) / 3))
  # Without the last setting, nothing determines the slope.
  x, y = np.array([[0.0], [0], [0], [0], [1]]), np.array([1.0, 2, 3, 4, 30])
  assert law._fit_line(x, y, np.arange(5))[1] == math.inf


def test_a_line_is_found_and_noise_is_not():
  settings = {str(n): predictors(n) for n in range(8)}
  measured = {
    name: law.Effect(2 + 30 * values[REVISITS], 1.0, 5)
    for name, values in settings.items()
  }
  found = law.fit(measured, settings)
  assert REVISITS in found.coefficients and found.error < 1e-6
  assert found.predict(settings['3']) == pytest.approx(measured['3'].mean)
  assert 'better than no' in law.describe(found)
  inside = dict(settings['3'])
  assert not found.outside(inside)
  assert found.outside(inside | {REVISITS: 1.5}) == [REVISITS]
  # Selection alone fits some of this noise; the reported error counts it.
  rng = np.random.default_rng(5)
  noise = {n: law.Effect(float(rng.normal()), 1.0, 5) for n in settings}
  found = law.fit(noise, settings)
  columns = [list(law.PREDICTORS).index(p) for p in found.coefficients]
  x = np.array([[v[p] for p in law.PREDICTORS] for v in settings.values()])
  y = np.array([effect.mean for effect in noise.values()])
  assert found.error > law._fit_line(x[:, columns], y, np.arange(len(y)))[1]
  assert 'do not rely on it' in law.describe(found)
  with pytest.raises(ValueError, match='3 settings with runs of their own'):
    law.fit({n: noise[n] for n in '012'}, settings)
  del settings['1'][CORRELATION]
  with pytest.raises(ValueError, match='1: has no advantage/correlation'):
    law.fit(noise, settings)


def test_settings_that_share_their_runs_make_no_law():
  settings = {f'keydoor alias {n}': predictors(n) for n in range(5)}
  measured = {name: law.Effect(1.0, 0.5, 5) for name in settings}
  with pytest.raises(ValueError, match='1 settings with runs of their own'):
    law.fit(measured, settings)


def test_effects_of_several_tables_are_compared(tmp_path, capsys):
  names = ('a', 'b')
  predicted = {'effect': 1.0, 'half_width': 2.0, 'outside': []}
  values = {'method': 'gigpo', 'predictions': dict.fromkeys(names, predicted)}
  (tmp_path / 'p.json').write_text(json.dumps(values))
  for name, gain in zip(names, (0.3, 0.1), strict=True):
    rows = [(name, 'grpo', 0, 0.2), (name, 'gigpo', 0, 0.2 + gain)]
    write_table(tmp_path / f'{name}.csv', rows)
  files = [str(tmp_path / name) for name in ('p.json', 'a.csv', 'b.csv')]
  assert law.main(['compare', *files]) == 0
  first, second = capsys.readouterr().out.splitlines()[-2:]
  assert '| +30.0 | 1 |' in first and '| +10.0 | 1 |' in second
  assert law.main(['compare', *files, files[1]]) == 2
  assert 'a.csv: has a, as an earlier' in capsys.readouterr().err


def test_one_seed_has_no_error_and_plots_need_a_folder(tmp_path, capsys):
  predictions = {'a': {'effect': 1.0, 'half_width': 2.0, 'outside': []}}
  measured = {'a': law.Effect(0.5, np.nan, 1)}
  assert '| +0.5 | 1 |' in law.table(predictions, measured)
  values = {'method': 'gigpo', 'predictions': predictions}
  (tmp_path / 'p.json').write_text(json.dumps(values))
  rows = [('a', method, 0, 0.2) for method in ('grpo', 'gigpo')]
  write_table(tmp_path / 'a.csv', rows)
  compare = ['compare', str(tmp_path / 'p.json'), str(tmp_path / 'a.csv')]
  assert law.main([*compare, f'--plot={tmp_path}/none/law.png']) == 2
  assert 'no such folder' in capsys.readouterr().err
  plot = tmp_path / 'law.png'
  plot.write_text('mine')
  assert law.main([*compare, f'--plot={plot}']) == 2
  assert plot.read_text() == 'mine'
  capsys.readouterr()
  write_table(tmp_path / 'a.csv', rows[:1])
  assert law.main(compare) == 2
  error = capsys.readouterr().err
  assert 'a.csv: has no runs of method gigpo and of grpo with equal' in error
  assert error.count('\n') == 1


@pytest.mark.parametrize(
  ('coefficients', 'new', 'message'),
  [
    ([1], {'a': {REVISITS: 0.5}}, 'law.json: not a law'),
    ({REVISITS: 1.0}, [1], 'new.json: holds no JSON object'),
    ({REVISITS: 1.0}, {'a': 3}, 'new.json: a: no predictors'),
    ({REVISITS: 1.0}, {'a': {REVISITS: 'x'}}, 'new.json: a: no predictors'),
  ],
)
def test_files_of_another_form_are_refused(
  tmp_path, capsys, coefficients, new, message
):
  values = dataclasses.asdict(
    law.Law('gigpo', 1.0, {}, 1.0, 2.0, 5, {REVISITS: (0.0, 1.0)})
  )
  for name, content in (
    ('law', {'law': values | {'coefficients': coefficients}}),
    ('new', new),
  ):
    (tmp_path / f'{name}.json').write_text(json.dumps(content))
  command = [f'{tmp_path}/law.json', f'{tmp_path}/new.json']
  assert law.main(['predict', *command, f'--output={tmp_path}/out.json']) == 2
  assert message in capsys.readouterr().err


def test_predictions_are_written_once_and_compared(tmp_path, capsys):
  runs, settings = [], {}
  for n in range(6):
    settings[f'keydoor {n}'] = values = predictors(n)
    gain = 0.3 * values[REVISITS]
    runs += [('keydoor', f'{n} grpo', s, 0.2) for s in (0, 1)]
    runs += [('keydoor', f'{n} gigpo', s, 0.2 + gain) for s in (0, 1)]
  write_table(tmp_path / 'dial.csv', runs)
  write_table(
    tmp_path / 'credit.csv',
    [
      ('webshop', m, s, x)
      for m, x in (('grpo', 0.5), ('gigpo', 0.65))
      for s in (0, 1)
    ],
  )
  paths = {
    name: str(tmp_path / name)
    for name in ('p.json', 'law.json', 'new.json', 'out.json', 'law.png')
  }
  (tmp_path / 'p.json').write_text(json.dumps(settings))
  new = {'webshop': predictors(9, **{REVISITS: 0.5})}
  (tmp_path / 'new.json').write_text(json.dumps(new))
  fit = ['fit', str(tmp_path / 'dial.csv'), paths['p.json']]
  assert law.main([*fit, f'--output={paths["law.json"]}']) == 0
  predict = ['predict', paths['law.json'], paths['new.json']]
  predict.append(f'--output={paths["out.json"]}')
  assert law.main(predict) == 0
  assert law.main(predict) == 2
  assert 'out.json: exists' in capsys.readouterr().err
  compare = ['compare', paths['out.json'], str(tmp_path / 'credit.csv')]
  assert law.main([*compare, f'--plot={paths["law.png"]}']) == 0
  row = capsys.readouterr().out.splitlines()[-1]
  assert row.startswith('| webshop | +15.0 [') and '| +15.0 ± 0.0 | 2 |' in row
  assert (tmp_path / 'law.png').stat().st_size > 1000
  damaged = json.loads(pathlib.Path(paths['out.json']).read_text())
  del damaged['predictions']['webshop']['half_width']
  for values in (damaged, damaged | {'predictions': 3}):
    path = tmp_path / 'damaged.json'
    path.write_text(json.dumps(values))
    capsys.readouterr()
    assert law.main(['compare', str(path), compare[2]]) == 2
    assert capsys.readouterr().err.endswith('law predict` wrote\n')


def test_correlation_of_advantages():
  similarity = advise.correlation_with_sum
  assert similarity(0.0, 1.0) == pytest.approx(math.sqrt(0.5))
  assert similarity(0.5, 1.0) == pytest.approx(1.5 / math.sqrt(3))
  assert similarity(-1.0, 1.0) == 0
  # Rounding alone would give -1 - 2e-16.
  assert similarity(-1.0, 1.01) == -1
  # Failed episodes are longer, so the mean of A_E over steps is not 0.
  x, y = np.random.default_rng(0).normal(size=(2, 50)) - [[2], [0]]
  correlation = np.corrcoef(x, y)[0, 1]
  assert similarity(correlation, y.std() / x.std()) == pytest.approx(
    np.corrcoef(x, x + y)[0, 1]
  )


def write_run(folder, **metrics):
  values = predictors(0) | {
    'advantage/zero_variance_groups': 0.5,
    'advantage/episode_std': 0.8,
    'advantage/step_std': 0.8,
  }
  values |= {name.replace('__', '/'): x for name, x in metrics.items()}
  lines = [{'iteration': n} | values for n in range(3)]
  lines.append({'iteration': 3} | {name: 1e9 for name in values})
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'metrics.jsonl').write_text(text)
  return values


def advice(folder, capsys, *flags):
  assert advise.main([str(folder), '--iterations=3', *flags]) == 0
  return capsys.readouterr().out


def test_advice_without_a_law(tmp_path, capsys):
  write_run(tmp_path, advantage__singleton_anchor_rows=1.0)
  out = advice(tmp_path, capsys)
  assert 'no step shares its anchor' in out
  assert out.endswith('advice: grpo: GiGPO equals it here\n')
  # A line with an evaluation only is not one of the iterations.
  with (tmp_path / 'metrics.jsonl').open() as file:
    kept = file.readlines()[:2]
  kept.append('{"iteration": 2, "eval/success_rate": 0.5}\n')
  (tmp_path / 'metrics.jsonl').write_text(''.join(kept))
  assert 'means over 2 iterations:' in advice(tmp_path, capsys)
  write_run(tmp_path, advantage__correlation=1.0)
  out = advice(tmp_path, capsys)
  assert (
    'correlation of the advantages of GRPO and GiGPO: 1.000 (w A_S is 1.00 '
    'times' in out
  )
  assert 'tune optimizer.learning_rate' in out and 'not known' in out
  # The weights are the run's.
  write_run(tmp_path, advantage__correlation=0.5)
  for weights, expected in (
    ({'step_weight': 0.5, 'episode_weight': None}, 1.25 / math.sqrt(1.75)),
    ({'step_weight': 1.0, 'episode_weight': 2.0}, 1.25 / math.sqrt(1.75)),
    ({'step_weight': 1.0, 'episode_weight': 0.0}, 0.5),
    ({'name': 'hgpo', 'episode_weight': None}, 0.5),
  ):
    config = json.dumps({'algorithm': weights})
    (tmp_path / 'config.json').write_text(config)
    out = advice(tmp_path, capsys)
    assert f'GiGPO: {expected:.3f}' in out and 'tune' not in out
  (tmp_path / 'config.json').write_text('{"algorithm": {"step_weight": 0.0}}')
  assert 'correlation of the advantages' not in advice(tmp_path, capsys)
  for stored in ('{}', '{"algorithm": null}'):
    (tmp_path / 'config.json').write_text(stored)
    assert '(w A_S is 1.00 times' in advice(tmp_path, capsys)
  (tmp_path / 'config.json').write_text('{"algorithm": "x"}')
  assert advise.main([str(tmp_path)]) == 2
  assert "its algorithm is 'x', no section" in capsys.readouterr().err
  assert advise.main([str(tmp_path / 'none')]) == 2
  assert 'none: has no metrics of an iteration' in capsys.readouterr().err
  assert advise.main([str(tmp_path), '--iterations=0']) == 2
  error = capsys.readouterr().err
  assert error == '--iterations=0: must be at least 1\n'


def test_a_law_of_the_best_method_gives_no_advice(tmp_path, capsys):
  write_run(tmp_path)
  path = pathlib.Path(__file__).parents[1] / 'docs/results/law_best.json'
  assert advise.main([str(tmp_path), f'--law={path}']) == 2
  error = capsys.readouterr().err
  assert error.startswith('--law: predicts the gain of the best of several')


@pytest.mark.parametrize(
  ('intercept', 'error', 'expected'),
  [
    (10.0, 1.0, 'advice: gigpo: the interval excludes 0'),
    (-10.0, 1.0, 'advice: grpo: the interval excludes 0'),
    (1.0, 1.0, 'advice: not known'),
    (10.0, 3.0, 'advice: not known'),  # No better than the mean effect.
    (40.0, 1.0, 'advice: gigpo'),
  ],
)
def test_advice_of_a_law(tmp_path, capsys, intercept, error, expected):
  values = write_run(tmp_path)
  fitted = {
    'method': 'gigpo',
    'intercept': intercept - 10 * values[REVISITS],
    'coefficients': {REVISITS: 10.0},
    'error': error,
    'constant_error': 2.0,
    'settings': 10,
    'ranges': {REVISITS: [0.0, 1.0]},
  }
  path = tmp_path / 'law.json'
  path.write_text(json.dumps({'law': fitted}))
  out = advice(tmp_path, capsys, f'--law={path}')
  assert f'here: {intercept:+.1f} points' in out and expected in out
  fitted['ranges'] = {REVISITS: [2.0, 3.0]}
  path.write_text(json.dumps({'law': fitted}))
  out = advice(tmp_path, capsys, f'--law={path}')
  assert 'outside the range of the law: train/revisit_rate' in out
  assert 'advice: not known' in out
