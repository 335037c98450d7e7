"""Tests of the comparison of runs."""

import json

import pytest

from gigpo_jax.tools import compare, plots


def _run(path, *, variant, seed, rates, secs=60.0, **settings):
  path.mkdir(parents=True)
  config = {'variant': variant, 'seed': seed, **settings}
  (path / 'config.json').write_text(json.dumps(config))
  lines = []
  for iteration, rate in enumerate(rates):
    line = {
      'iteration': iteration,
      'time/iteration_secs': secs,
      'spent/episodes': 32 * (iteration + 1),
    }
    if rate is not None:
      line |= {
        'eval/success_rate': rate,
        'eval/success_low': rate - 0.1,
        'eval/success_high': rate + 0.1,
      }
    lines.append(json.dumps(line))
  (path / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  return str(path)


def test_table_has_first_and_last_evaluation(tmp_path, capsys):
  gigpo = _run(
    tmp_path / 'a', variant='tiny', seed=3, rates=[0.25, None, 0.5, 0.625]
  )
  grpo = _run(tmp_path / 'b', variant='tiny,grpo', seed=4, rates=[0.25])
  out = tmp_path / 'curves.png'
  assert compare.main([gigpo, grpo, f'--out={out}']) == 0
  rows = capsys.readouterr().out.splitlines()
  assert rows[2] == (
    '| `tiny` | 3 | 25.0% | 50.0% | 62.5% [52.5%, 72.5%] | +37.5 | 128 | 4 |'
  )
  assert rows[3] == (
    '| `tiny,grpo` | 4 | 25.0% |  | 25.0% [15.0%, 35.0%] | +0.0 | 32 | 1 |'
  )
  assert out.read_bytes().startswith(b'\x89PNG')


def test_unfinished_runs_are_reported(tmp_path, capsys):
  runs = [
    _run(
      tmp_path / name, variant='tiny', seed=seed, rates=rates, num_iterations=2
    )
    for seed, (name, rates) in enumerate(
      {'whole': [0.25, None, 0.5], 'begun': [0.25, None]}.items()
    )
  ]
  assert compare.main(runs) == 0
  (line,) = capsys.readouterr().out.splitlines()[5:]
  assert line == 'begun: last evaluated at iteration 0 of 2'


def test_a_field_with_an_old_name_is_the_same_field(tmp_path):
  runs = [
    _run(
      tmp_path / name,
      variant='tiny',
      seed=seed,
      rates=[0.5],
      filter={name: True},
    )
    for seed, name in enumerate(('without_spread', 'drop_zero_variance'))
  ]
  names = [name for name, *_ in compare.load_all(runs)]
  assert names == ['tiny', 'tiny']


def test_runs_that_differ_in_more_than_the_seed_have_their_own_names(tmp_path):
  def run(name, seed, rate, **options):
    settings = {'optimizer': {'learning_rate': rate}, **options}
    return _run(
      tmp_path / name, variant='tiny', seed=seed, rates=[0.5], **settings
    )

  low = run('low', 0, 1e-4)
  other_seed = run('other_seed', 1, 1e-4, pool={'num_workers': 7})
  names = [name for name, *_ in compare.load_all([low, other_seed])]
  assert names == ['tiny', 'tiny']
  runs = compare.load_all([low, run('high', 0, 3e-4), other_seed])
  assert [run[:2] for run in runs] == [
    ('tiny, low', 0),
    ('tiny, high', 0),
    ('tiny, low', 1),
  ]
  high = str(tmp_path / 'high')
  assert compare.differences([low, other_seed]) == []
  assert compare.differences([low, high, other_seed]) == [
    'high differs from low: optimizer.learning_rate=0.0003 (0.0001)'
  ]
  # Other methods have other settings, but usually not another evaluation.
  grpo = _run(
    tmp_path / 'grpo',
    variant='tiny,grpo',
    seed=0,
    rates=[0.5],
    optimizer={'learning_rate': 2e-4},
    evaluation={'num_tasks': 8},
  )
  assert compare.differences([low, grpo]) == [
    'grpo differs from low: evaluation.num_tasks=8 (None)'
  ]
  options = {f'option{n}': n for n in range(7)}
  (line,) = compare.differences([low, run('others', 0, 1e-4, **options)])
  assert line.endswith('option4=4 (None), 2 more')
  own = _run(tmp_path / 'own', variant='', seed=0, rates=[0.5])
  assert compare.load_all([own])[0][:2] == ('own', 0)
  copy = run('copy', 0, 1e-4)
  with pytest.raises(ValueError, match='copy: has the config and .* of .*low;'):
    compare.load_all([low, copy])


def test_equal_folder_names_are_told_apart_by_their_parents(tmp_path):
  workdirs = [
    _run(
      tmp_path / f'rate{rate}' / f'seed{seed}',
      variant='tiny',
      seed=seed,
      rates=[0.5],
      optimizer={'learning_rate': rate},
    )
    for rate in (1, 2)
    for seed in (0, 1)
  ]
  assert [run[:2] for run in compare.load_all(workdirs)] == [
    ('tiny, rate1/seed0', 0),
    ('tiny, rate1/seed0', 1),
    ('tiny, rate2/seed0', 0),
    ('tiny, rate2/seed0', 1),
  ]
  assert compare.differences(workdirs[::2]) == [
    'rate2/seed0 differs from rate1/seed0: optimizer.learning_rate=2 (1)'
  ]


def test_no_plot_without_out_flag(tmp_path, monkeypatch, capsys):
  run = _run(tmp_path / 'a', variant='tiny', seed=3, rates=[0.25, 0.5])
  (tmp_path / 'here').mkdir()
  monkeypatch.chdir(tmp_path / 'here')
  assert compare.main([run]) == 0
  assert 'curves' not in capsys.readouterr().out
  assert not list((tmp_path / 'here').iterdir())


def test_non_run_folder_is_refused_in_one_line(tmp_path, capsys):
  assert compare.main([str(tmp_path)]) == 2
  assert capsys.readouterr().err == (
    f'{tmp_path}: no config.json; must be the --workdir of a run\n'
  )
  unevaluated = _run(tmp_path / 'c', variant='tiny', seed=0, rates=[None, None])
  assert compare.main([unevaluated]) == 2
  assert 'no eval/success_rate in 2 iterations' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['curves', 'a.b.svg', 'curves.pdf'])
def test_only_earlier_plots_are_replaced(tmp_path, capsys, name):
  run = _run(tmp_path / 'a', variant='tiny', seed=0, rates=[0.5, 0.5])
  command = [run, f'--out={tmp_path / name}']
  path = tmp_path / ('curves.png' if name == 'curves' else name)
  for _ in range(2):
    assert compare.main(command) == 0
    assert capsys.readouterr().out.endswith(f'\ncurves: {path}\n')
    drawn = path.read_bytes()
    path.write_bytes(drawn[:-1])
  with plots.image(path) as (_, axes):
    axes.plot([1])
  other = path.read_bytes()
  assert compare.main(command) == 2
  printed = capsys.readouterr()
  assert not printed.out and printed.err == (
    f'--out={path}: exists and is no plot of this command; must be a new file '
    'or an earlier plot\n'
  )
  assert path.read_bytes() == other


def test_names_are_no_formulas(tmp_path):
  run = _run(tmp_path / 'cost_$5_vs_$10', variant='', seed=0, rates=[0.5, 0.5])
  assert compare.main([run, f'--out={tmp_path / "curves.png"}']) == 0


def test_a_folder_as_a_plot_is_refused(tmp_path, capsys):
  assert compare.main([str(tmp_path), f'--out={tmp_path}']) == 2
  error = capsys.readouterr().err
  assert error.startswith(f'--out={tmp_path}: is a folder; must be an image')
  assert not tmp_path.with_suffix('.png').exists()


@pytest.mark.parametrize(
  ('name', 'reason'),
  [
    ('curves.foo', 'unknown format; must end in .png, .svg, .pdf'),
    ('curves.jpg', 'unknown format'),
    ('none/curves.png', 'no such folder'),
  ],
)
def test_a_plot_that_cannot_be_written_is_one_line(
  tmp_path, capsys, name, reason
):
  run = _run(tmp_path / 'a', variant='tiny', seed=0, rates=[0.5, 0.5])
  assert compare.main([run, f'--out={tmp_path / name}']) == 2
  printed = capsys.readouterr()
  assert printed.err.startswith(f'--out={tmp_path / name}: {reason}')
  assert len(printed.err.splitlines()) == 1 and not printed.out


def test_run_without_evaluation_is_refused():
  with pytest.raises(ValueError, match='the run must evaluate'):
    compare.evaluations([{'iteration': 0}])
