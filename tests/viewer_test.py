"""Tests of the viewer: the data it serves, and the page in a real browser."""

import base64
import dataclasses
import gzip
import html
import json
import math
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import numpy as np
import pytest
from array_record.python import array_record_module
from werkzeug import serving

from envs import base
from gigpo_jax import (
  algorithms,
  batch,
  episode_records,
  episodes,
  group_filter,
  metrics,
  tokenizer,
  trajectory,
)
from gigpo_jax.tools import viewer

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
CHROMIUM_FLAGS = (
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
)
HOSTILE = (
  '</script><script>document.title="owned"</script>'
  '<img src=x onerror="document.title=\'owned\'"> "quoted" \'too\' &amp; '
  '\u202eturned\u202c שלום 🧑‍🚀 {{ 7 * 7 }}'
)
LONG = 'very long ' * 1000
STATES = (f'You are in the hall. {HOSTILE}', 'You are in the kitchen.', LONG)


def _step(text, index, *, last, success, valid):
  action = f'go to room {index}' if valid else HOSTILE
  response = f'<think>I want ☕ and {HOSTILE}</think><action>{action}</action>'
  state = STATES[index % 3]
  ids = text.encode([response])[0]
  surprisal = np.random.default_rng(len(ids) + index).exponential(0.4, len(ids))
  return trajectory.Step(
    prompt_ids=text.render([f'What now? {state}'])[0],
    completion_ids=ids,
    log_probs=-surprisal.astype(np.float32),
    truncated=not valid,
    prompt_shortened=index == 2,
    anchor=state,
    observation=state,
    response=response,
    result=base.StepResult(
      None, 10.0 * (success and last), valid, action, success and last, last
    ),
  )


def _episode(text, group, member):
  success, length = (group + member) % 2 == 0, 2 + member
  steps = tuple(
    _step(
      text, n, last=n == length - 1, success=success, valid=success or n != 1
    )
    for n in range(length)
  )
  task = base.Task('train', 40 + group)
  task_type = ('pick', 'heat<b>')[group]
  failure = 'worker died <b>' if (group, member) == (1, 2) else ''
  return trajectory.Trajectory(task, task_type, group, member, steps, failure)


@pytest.fixture(name='workdir', scope='module')
def fixture_workdir(tmp_path_factory):
  """Returns a run of three iterations, two of them with stored episodes."""
  root = tmp_path_factory.mktemp('run') / 'a<b>run'
  root.mkdir()
  tokenizer.train([HOSTILE, *STATES], str(root / 'text'), vocab_size=400)
  text = tokenizer.Tokenizer(str(root / 'text'))
  (root / 'config.json').write_text(
    json.dumps({'seed': 3, 'variant': HOSTILE, 'algorithm': {'name': 'gigpo'}})
  )
  writer = metrics.Writer(root)
  log = episodes.EpisodeWriter(root / 'episodes', text, seed=3, every=2)
  for iteration in range(3):
    trajectories = [_episode(text, g, m) for g in range(2) for m in range(3)]
    collected = group_filter.CollectedGroups(
      trajectories, trajectories, list(range(6)), {}
    )
    rows = batch.from_trajectories(
      trajectories, max_prompt_tokens=20_000, max_completion_tokens=800
    )
    log.write(
      iteration,
      collected,
      rows,
      algorithms.make('gigpo').compute_advantages(rows),
    )
    line = metrics.summarize(trajectories) | {
      'loss/entropy': 1 / (1 + iteration)
    }
    if iteration == 2:
      line |= {'eval/success_rate': 0.5, 'loss/total': math.nan}
    writer.write(iteration, line)
  writer.close()
  return root


def test_tokens_of_one_character_form_one_span(workdir):
  text = tokenizer.Tokenizer(str(workdir / 'text'))
  (ids,) = text.encode(['a ☕ b'])

  def decode(ids_of_span):
    return text.decode([np.array(ids_of_span)])[0]

  ids = ids.tolist()
  spans = viewer.spans(decode, ids, [-0.5] * len(ids))
  assert ''.join(text for text, _, _ in spans) == 'a ☕ b'
  assert sum(count for _, _, count in spans) == len(ids)
  cup = next(span for span in spans if '☕' in span[0])
  assert cup[2] > 1 and cup[1] == -0.5 * cup[2]
  # A diverged policy has NaN and infinity, which JSON lacks.
  diverged = viewer.spans(decode, ids[:2], [math.nan, -math.inf])
  assert [log_prob for _, log_prob, _ in diverged] == [None, None]
  # The completion ends within the character.
  partial = viewer.spans(decode, ids[:3], [-0.5] * 3)
  assert sum(count for _, _, count in partial) == 3


def test_application_serves_run_iterations_and_steps(workdir):
  client = viewer.application(workdir).test_client()
  run = client.get('/run.json').json
  assert run['name'] == 'a<b>run' and run['iterations'] == [0, 2]
  assert [line['iteration'] for line in run['metrics']] == [0, 1, 2]
  groups = client.get('/iterations/2.json').json['groups']
  assert [(g['task'], g['kind']) for g in groups] == [
    ('train/40', 'pick'),
    ('train/41', 'heat<b>'),
  ]
  succeeded, failed, _ = groups[0]['episodes']
  assert (
    succeeded['success'] and not failed['success'] and succeeded['return'] == 10
  )
  (record, *_) = episodes.open_dataset(workdir / 'episodes').read(2)
  assert (succeeded['length'], failed['invalid']) == (2, 1)
  steps = client.get('/iterations/2/0.json').json
  assert [len(episode_steps) for episode_steps in steps] == [2, 3, 4]
  step, shown = record['steps'][0], steps[0][0]
  assert ''.join(text for text, _, _ in shown['tokens']) == step['response']
  assert sum(p for _, p, _ in shown['tokens']) == pytest.approx(
    step['log_probs'].sum(), abs=1e-2
  )
  assert shown['prompt_tokens'] == len(step['prompt_ids'])
  assert shown['messages'] == [['user', f'What now? {step["anchor"]}']]
  assert shown['continues'] is None and not shown['calls']
  assert shown['step_advantage'] == pytest.approx(step['step_advantage'], 1e-3)
  assert shown['state'] == step['anchor_group']
  aborted = groups[1]['episodes'][2]
  assert aborted['failure'] and not aborted['trained']
  (*_, aborted) = client.get('/iterations/2/1.json').json
  assert aborted[0]['advantage'] is None
  for missing in ('1', '2/2', '1/0'):
    response = client.get(f'/iterations/{missing}.json')
    assert response.status_code == 404 and 'not kept' in response.json['error']


@pytest.fixture(name='damaged', params=['record', 'truncated', 'flipped'])
def fixture_damaged(request, workdir, tmp_path):
  """Returns a run with damaged records of iteration 2; iteration 0 is valid."""
  root = tmp_path / 'damaged'
  shutil.copytree(workdir, root)
  path = sorted((root / 'episodes').glob('*.array_record-*'))[1]
  data = bytearray(path.read_bytes())
  if request.param == 'record':
    records = episodes.open_dataset(root / 'episodes').source
    encoded = [records[n] for n in range(6, 12)]
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
    for n, record in enumerate(encoded):
      writer.write(record if n != 4 else record[: len(record) // 2])
    writer.close()
  elif request.param == 'truncated':
    path.write_bytes(data[: len(data) // 2])
  else:
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(b ^ 0xFF for b in data[middle:][:64])
    path.write_bytes(data)
  return root


def test_damaged_record_error_names_the_file(damaged):
  client = viewer.application(damaged).test_client()
  assert client.get('/').status_code == 200
  answer = client.get('/iterations/2.json')
  assert answer.status_code == 500
  assert 'episodes-train.array_record-00001: record ' in answer.json['error']
  assert 'is damaged' in answer.json['error']
  assert '\n' not in answer.json['error']
  with pytest.raises(ValueError, match='is damaged'):
    viewer.export(damaged, damaged / 'run.html')


def test_errors_are_json(workdir, tmp_path):
  root = tmp_path / 'run'
  shutil.copytree(workdir, root)
  client = viewer.application(root).test_client()
  (root / 'config.json').write_text('{')
  assert 'config.json' in client.get('/run.json').json['error']
  (root / 'episodes/tokenizer/tokenizer.json').write_text('{')
  assert 'tokenizer.json' in client.get('/iterations/2/0.json').json['error']
  (root / 'episodes/dataset_info.json').write_text('{')
  assert 'cannot be read' in client.get('/iterations/2.json').json['error']
  answer = client.get('/nowhere')
  assert answer.status_code == 404 and answer.json['error']
  assert answer.headers['X-Content-Type-Options'] == 'nosniff'


def test_all_responses_forbid_sniffing(workdir):
  client = viewer.application(workdir).test_client()
  for path in ('/', '/run.json', '/iterations/2.json', '/iterations/1.json'):
    assert client.get(path).headers['X-Content-Type-Options'] == 'nosniff'


@pytest.mark.parametrize('host', ['127.0.0.1', '0.0.0.0', '::', 'localhost'])
def test_foreign_host_headers_are_refused(workdir, host):
  client = viewer.application(workdir, (host, 'proxy.example')).test_client()

  def status(name):
    return client.get('/run.json', headers={'Host': name}).status_code

  accepted = ('localhost', 'LOCALHOST.:80', '127.0.0.1:8010', '[::1]:8010')
  accepted += ('10.1.2.3', socket.gethostname(), 'Proxy.example')
  assert {name: status(name) for name in accepted} == dict.fromkeys(
    accepted, 200
  )
  refused = ('evil.example', 'evil.example:8010', 'localhost.evil.example')
  refused += ('127.0.0.1.evil.example', '[::1', '')
  assert {name: status(name) for name in refused} == dict.fromkeys(refused, 400)


def test_export_decodes_every_record_once(workdir, tmp_path, monkeypatch):
  decoded, decode = [], episode_records.decode

  def count(data, **kwargs):
    decoded.append(data)
    return decode(data, **kwargs)

  monkeypatch.setattr(episode_records, 'decode', count)
  viewer.export(workdir, tmp_path / 'run.html')
  assert len(decoded) == 12


def test_an_export_replaces_no_other_file(workdir, tmp_path):
  path = tmp_path / 'env.py'
  path.write_text('mine')
  with pytest.raises(
    ValueError, match='env.py: exists and is no exported page'
  ):
    viewer.export(workdir, path)
  assert path.read_text() == 'mine'
  foreign = tmp_path / 'foreign.html'
  foreign.write_text('<!DOCTYPE html><meta charset="utf-8">')
  with pytest.raises(ValueError, match='is no exported page'):
    viewer.export(workdir, foreign)
  for _ in range(2):
    viewer.export(workdir, tmp_path / 'run.html')


def test_foreign_text_is_never_html(workdir, tmp_path):
  client = viewer.application(workdir).test_client()
  viewer.export(workdir, tmp_path / 'run.html')
  exported = (tmp_path / 'run.html').read_text()
  for text in (client.get('/').text, exported):
    assert 'owned' not in text and '<img' not in text
    assert '<title>a&lt;b&gt;run</title>' in text
    # The only absolute URL is SVG's namespace.
    assert set(re.findall(r'https?://[^\s\'"]+', text)) == {
      'http://www.w3.org/2000/svg'
    }
  parts = dict(
    re.findall(
      r'<script type="[^"]+" data-part="([^"]+)">(.*?)</script>', exported
    )
  )
  assert len(parts) == 1 + 2 * 3
  for name in ('iterations/2', 'iterations/0/1'):
    data = json.loads(gzip.decompress(base64.b64decode(parts[name])))
    assert data == client.get(f'/{name}.json').json


def test_an_export_to_a_full_disk_keeps_the_earlier_one(workdir, tmp_path):
  path, partial = tmp_path / 'run.html', tmp_path / 'run.html.tmp'
  viewer.export(workdir, path)
  before = path.read_bytes()
  partial.symlink_to('/dev/full')
  with pytest.raises(ValueError, match='--export=.*: cannot be written'):
    viewer.export(workdir, path, [2])
  assert path.read_bytes() == before and not partial.exists()


def test_export_of_selected_iterations(workdir, tmp_path):
  viewer.export(workdir, tmp_path / 'run.html', [2])
  html = (tmp_path / 'run.html').read_text()
  assert 'iterations/2' in html and 'iterations/0' not in html
  with pytest.raises(ValueError, match='iterations=1: .* kept: 0, 2'):
    viewer.export(workdir, tmp_path / 'run.html', [1])
  with pytest.raises(ValueError, match='--export=/dev/full: cannot be written'):
    viewer.export(workdir, '/dev/full', [2])


def test_summary_refuses_a_folder_without_a_run(tmp_path):
  with pytest.raises(ValueError, match='holds no run; .* or episodes/$'):
    viewer.summary(tmp_path)
  # Of launch/evaluate.py.
  (tmp_path / 'evaluation/0/episodes').mkdir(parents=True)
  hint = f'did you mean --workdir={tmp_path}/evaluation/0'
  with pytest.raises(ValueError, match=hint):
    viewer.summary(tmp_path)
  # Of a run that compiles its programs.
  (tmp_path / 'config.json').write_text('{}')
  (tmp_path / 'metrics.jsonl').touch()
  with pytest.raises(ValueError, match='no finished iteration yet; try again'):
    viewer.summary(tmp_path)


def _view(*flags):
  return subprocess.Popen(
    [sys.executable, 'launch/view.py', *flags],
    cwd=pathlib.Path(viewer.__file__).parents[2],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def test_view_command_serves_until_interrupted(workdir):
  with _view(f'--workdir={workdir}', '--port=0') as process:
    address = process.stdout.readline().strip()
    with urllib.request.urlopen(f'{address}run.json', timeout=60) as answer:
      assert json.load(answer)['iterations'] == [0, 2]
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
  assert process.returncode == 130
  # And no line about the request.
  assert stderr == 'interrupted; the same command shows the page again\n'


def test_view_command_error_is_one_line(tmp_path):
  with _view(f'--workdir={tmp_path}', '--export=run.html') as process:
    _, stderr = process.communicate(timeout=60)
  assert process.returncode == 2
  assert stderr == (
    f'--workdir={tmp_path}: holds no run; must have metrics.jsonl '
    'or episodes/\n'
  )


def test_iterations_are_only_selected_for_an_export(workdir):
  with _view(f'--workdir={workdir}', '--iterations=0,1') as process:
    _, stderr = process.communicate(timeout=60)
  assert process.returncode == 2
  assert stderr == (
    '--iterations=0,1: selects what to export; must be empty, or needs '
    '--export\n'
  )


@pytest.fixture(name='browser', scope='module')
def fixture_browser():
  playwright = pytest.importorskip('playwright.sync_api')
  with playwright.sync_playwright() as started:
    path = CHROMIUM or started.chromium.executable_path
    if not pathlib.Path(path).is_file():
      pytest.skip('no Chromium here; run playwright install chromium')
    browser = started.chromium.launch(
      executable_path=path, args=list(CHROMIUM_FLAGS)
    )
    yield browser
    browser.close()


@pytest.fixture(name='address', scope='module')
def fixture_address(request, workdir, tmp_path_factory):
  if getattr(request, 'param', 'served') == 'exported':
    path = tmp_path_factory.mktemp('exported') / 'run.html'
    viewer.export(workdir, path)
    yield path.as_uri()
    return
  server = serving.make_server(
    '127.0.0.1', 0, viewer.application(workdir), threaded=True
  )
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  yield f'http://127.0.0.1:{server.server_port}/'
  server.shutdown()
  thread.join()
  server.server_close()


@pytest.fixture(name='page')
def fixture_page(browser, address):
  """Opens the page; fails on page errors and external requests."""
  page = browser.new_page(viewport={'width': 1500, 'height': 950})
  errors, requests = [], []
  page.on('pageerror', lambda error: errors.append(str(error)))
  page.on(
    'console',
    lambda line: errors.append(line.text) if line.type == 'error' else None,
  )
  page.on('request', lambda request: requests.append(request.url))
  page.goto(address)
  page.wait_for_selector('body[data-ready]')
  yield page
  page.close()
  assert not errors
  allowed = (address.partition('#')[0].rpartition('/')[0], 'data:', 'blob:')
  assert all(url.startswith(allowed) for url in requests), requests


@pytest.mark.parametrize('address', ['served', 'exported'], indirect=True)
def test_initial_view(page):
  assert page.text_content('#name') == 'a<b>run'
  assert page.locator('.curve').count() >= 4
  assert page.input_value('#iteration') == '2'
  assert page.locator('#groups button').count() == 2
  assert page.locator('.episode').count() == 3
  assert page.locator('.episode.success').count() == 2
  first = page.locator('.episode[data-member="0"] .step').first
  assert 'go to room 0' in first.text_content()
  assert 'not trained on' not in page.text_content('#group')
  page.locator('#groups button').nth(1).click()
  page.wait_for_selector('.episode.broken')
  assert 'worker died <b>' in page.text_content('.episode.broken')


@pytest.mark.parametrize('address', ['served', 'exported'], indirect=True)
def test_hostile_text_is_shown_as_text(page):
  assert page.title() == 'a<b>run'
  shown = page.locator('.step .response').first.text_content()
  expected = HOSTILE.replace('\u202e', 'u202e').replace('\u202c', 'u202c')
  assert expected in shown
  assert expected in page.locator('.observation').first.text_content()
  assert page.locator('img, .step script, .step b').count() == 0
  assert page.locator('.escape').count() > 0
  page.locator('.step details summary').first.click()
  assert expected in page.locator('.step pre').first.text_content()
  # No text makes the page wider than the window.
  assert page.evaluate('document.documentElement.scrollWidth') <= 1500


def test_token_hints_show_log_probs(page):
  tokens = page.locator('.step .response').first.locator('.token')
  assert tokens.count() > 20
  tokens.nth(3).hover()
  hint = page.text_content('#hint')
  assert re.fullmatch(
    r'log-prob −?\d+\.\d{3} · [\d.e+-]+ %( · \d tokens)?', hint
  )
  colours = tokens.evaluate_all('all => all.map((t) => t.style.background)')
  assert len(set(colours)) > 5


def test_advantages_are_coloured_by_sign(page):
  page.locator('#groups button').first.click()

  def colour(member, chip):
    steps = page.locator(f'.episode[data-member="{member}"] .step')
    chips = steps.first.locator('.numbers span')
    return chips.filter(has_text=chip).evaluate('chip => chip.style.background')

  assert '--above' in colour(0, 'episode') and '--above' in colour(0, 'total')
  assert '--below' in colour(1, 'episode') and '--below' in colour(1, 'step')


def test_anchor_highlights_steps_of_the_same_state(page):
  anchor = page.locator('.episode[data-member="0"] .anchor').first
  anchor.hover()
  assert (
    page.locator('.step.same').count() == 4
  )  # Three episode starts and one revisit.
  anchor.click()
  rows = page.locator('#state tbody tr')
  assert rows.count() == 4
  rows.nth(2).click()
  page.wait_for_selector('#step-2-0.flash, #step-1-0.flash')
  page.mouse.move(1, 1)  # Move the mouse off all states.
  page.keyboard.press('Escape')
  assert page.locator('.step.same').count() == 0
  assert page.locator('#state').is_hidden()


def test_the_numbers_are_those_of_the_records(page, workdir):
  (group, *_), (steps, *_) = (
    viewer.iteration(workdir, 2)['groups'],
    viewer.steps(workdir, 2, 0),
  )
  assert page.locator('.episode[data-member="0"] .right').text_content() == (
    f'return {group["episodes"][0]["return"]:.2f} · {len(steps)} steps'
  )
  cards = page.locator('.episode[data-member="0"] .step')
  columns = {
    'reward': 'reward',
    'return': 'discounted_return',
    'episode': 'episode_advantage',
    'step': 'step_advantage',
    'total': 'advantage',
  }

  def shown(text):
    return float(text.replace('−', '-'))

  for n, step in enumerate(steps):
    chips = cards.nth(n).locator('.numbers span').all_text_contents()
    assert len(chips) == len(columns)
    for chip, (label, field) in zip(chips, columns.items(), strict=True):
      assert chip.startswith(label)
      assert shown(chip.removeprefix(label)) == pytest.approx(
        step[field], abs=0.006
      )
  # Their states differ, so each test of a column has a chance to fail.
  assert len({step['step_advantage'] for step in steps}) > 1
  cards.first.locator('.anchor').click()
  cells = page.locator('#state tbody tr').first.locator('td')
  _, at, action, returned, advantage = cells.all_text_contents()
  assert (int(at), action) == (0, steps[0]['action'])
  for text, field in (
    (returned, 'discounted_return'),
    (advantage, 'step_advantage'),
  ):
    assert shown(text) == pytest.approx(steps[0][field], abs=0.006)


def test_curves_show_the_metrics(served, tmp_path):
  lines = [
    {
      'iteration': n,
      'train/success_rate': n / 4,
      'train/score': 2.5 - n,
      'train/invalid_action_rate': 0.002 * n,
    }
    | ({} if n < 3 else {'eval/success_rate': 0.5})
    for n in range(4)
  ]
  with (tmp_path / 'metrics.jsonl').open('w') as file:
    file.writelines(json.dumps(line) + '\n' for line in lines)
  page = served(tmp_path)
  success, score, invalid, _ = page.locator('.curve').all()

  def points(chart):
    path = chart.locator('path[d^="M"]').first.get_attribute('d')
    return [tuple(map(float, x.split())) for x in re.split('[ML]', path)[1:]]

  x, y = zip(*points(success), strict=True)
  np.testing.assert_allclose(np.diff(x), (x[3] - x[0]) / 3, atol=0.2)
  # From 0 % at the lower line of the grid to 100 % at the upper one.
  grid = success.locator('line.grid')
  bottom, top = (float(grid.nth(n).get_attribute('y1')) for n in (0, 1))
  expected = [bottom + (top - bottom) * n / 4 for n in range(4)]
  np.testing.assert_allclose(y, expected, atol=0.1)
  dot = float(success.locator('circle').get_attribute('cy'))
  assert dot == pytest.approx(expected[2], abs=0.1)
  assert success.locator('.now').text_content() == '75.0% · eval 50.0%'
  # A score may lie outside of [0, 1], and a rate far below 1 %.
  assert score.locator('text').all_text_contents()[:2] == ['-50%', '250%']
  assert all(top - 0.1 <= y <= bottom + 0.1 for _, y in points(score))
  assert invalid.locator('text').all_text_contents()[:2] == ['0%', '0.69%']
  success.locator('svg').hover(position={'x': x[1] * 0.9, 'y': 20})
  assert re.fullmatch(r'iteration \d: .*%', page.text_content('#hint'))


@pytest.mark.parametrize(
  ('scores', 'labels'),
  [
    ((-3.0, -1.0), ['-300%', '0%']),
    ((-10.0, -9.0), ['-1000%', '0%']),
    ((0.0, 0.0), ['0%', '100%']),
    ((-1.0, 0.2), ['-100%', '23%']),
  ],
  ids=str,
)
def test_all_scores_are_inside_of_the_chart(served, tmp_path, scores, labels):
  with (tmp_path / 'metrics.jsonl').open('w') as file:
    for n, score in enumerate(scores):
      file.write(f'{{"iteration": {n}, "train/score": {score}}}\n')
  score, _ = served(tmp_path).locator('.curve').all()
  assert score.locator('text').all_text_contents()[:2] == labels
  path = score.locator('path[d^="M"]').first.get_attribute('d')
  y = [float(point.split()[1]) for point in re.split('[ML]', path)[1:]]
  grid = score.locator('line.grid')
  bottom, top = (float(grid.nth(n).get_attribute('y1')) for n in (0, 1))
  assert top - 0.1 <= min(y) <= max(y) <= bottom + 0.1


def test_back_leaves_an_incomplete_address(page, address):
  page.goto(address.partition('#')[0] + '#iteration=0')
  page.reload()
  page.wait_for_url('**#iteration=0&group=0')
  entries = page.evaluate('history.length')
  page.evaluate("location.hash = '#iteration=2&text=room%200'")
  page.wait_for_url('**text=room+0')
  assert page.evaluate('history.length') == entries + 1


def test_the_address_keeps_selection_and_filters(page, address):
  page.locator('#groups button').nth(1).click()
  page.wait_for_url('**group=1')
  page.go_back()
  _expect_count(page, '[data-group="0"][aria-current="true"]', 1)
  page.select_option('#outcome', 'success')
  page.fill('#text', 'room 0')
  page.wait_for_url('**outcome=success&text=room+0')
  page.reload()
  page.wait_for_selector('body[data-ready]')
  assert page.input_value('#outcome') == 'success'
  assert page.input_value('#text') == 'room 0'
  page.evaluate("location.hash = '#iteration=0&group=1'")
  _expect_count(page, '[data-group="1"][aria-current="true"]', 1)
  assert page.input_value('#iteration') == '0'
  assert page.input_value('#text') == ''


def test_a_failed_request_is_repeated(served, workdir):
  page = served(workdir)
  page.route('**/iterations/2/1.json', lambda route: route.abort())
  page.locator('#groups button').nth(1).click()
  page.wait_for_selector('#group .error')
  page.unroute('**/iterations/2/1.json')
  page.locator('#groups button').nth(1).click()
  page.wait_for_selector('.episode.broken')


def test_the_browser_finds_all_responses(page):
  responses = page.locator('.response').all_text_contents()
  assert len(responses) > 5 and all('I want ☕' in x for x in responses)


def test_texts_unfold_and_groups_keep_the_focus_by_keyboard(page):
  observation = page.locator('.observation').first
  observation.focus()
  page.keyboard.press('Enter')
  assert 'open' in observation.get_attribute('class')
  page.locator('#groups button').nth(1).focus()
  page.keyboard.press('Enter')
  page.wait_for_selector('.episode.broken')
  focused = 'document.activeElement.dataset.group'
  page.wait_for_function(f'{focused} === "1"')
  page.focus('#metric')
  for _ in range(2):
    page.keyboard.press('ArrowDown')
  assert page.evaluate('document.activeElement.id') == 'metric'


def _expect_count(page, selector, count):
  """Waits until the selector matches `count` elements."""
  expect = pytest.importorskip('playwright.sync_api').expect
  expect(page.locator(selector)).to_have_count(count)


def test_filters(page):
  page.select_option('#outcome', 'success')
  _expect_count(page, '.episode', 2)
  page.select_option('#outcome', '')
  page.check('#invalid')
  _expect_count(page, '.episode', 1)
  _expect_count(page, '.badge.bad', 1)
  page.uncheck('#invalid')
  page.select_option('#kind', 'heat<b>')
  _expect_count(page, '#groups button', 1)
  page.fill('#text', 'room 3')
  _expect_count(page, '.episode', 1)
  page.fill('#text', 'nowhere to be found')
  _expect_count(page, '.episode', 0)
  assert 'No episode' in page.text_content('#groups')


@pytest.mark.parametrize('address', ['served', 'exported'], indirect=True)
def test_select_iteration_and_metric(page):
  page.click('#before')
  page.wait_for_url('**#iteration=0&group=0')
  assert page.input_value('#iteration') == '0'
  page.keyboard.press(']')
  page.wait_for_url('**#iteration=2&group=0')
  page.select_option('#metric', 'train/prompt_tokens')
  assert page.input_value('#metric') == 'train/prompt_tokens'


def test_export_works_in_a_notebook_iframe(browser, workdir, tmp_path):
  viewer.export(workdir, tmp_path / 'run.html')
  page = browser.new_page()
  errors = []
  page.on('pageerror', lambda error: errors.append(str(error)))
  srcdoc = html.escape((tmp_path / 'run.html').read_text())
  page.set_content(f'<iframe srcdoc="{srcdoc}" width=1400 height=800></iframe>')
  frame = page.frame_locator('iframe')
  frame.locator('.episode').first.wait_for()
  assert frame.locator('#groups button').count() == 2
  page.close()
  assert not errors


def test_open_page_follows_a_growing_run(served, tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(0, {'train/success_rate': 0.5, 'loss/total': math.nan})
  page = served(tmp_path)
  assert page.locator('#metric option').all_text_contents() == [
    'train/success_rate'
  ]
  writer.write(1, {'loss/total': 2.0})
  page.evaluate('refresh()')
  _expect_count(page, '#metric option', 2)
  writer.close()


def test_run_without_episodes_shows_curves(browser, tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(0, {'train/success_rate': 0.5})
  writer.close()
  path = pathlib.Path(tmp_path / 'run.html')
  viewer.export(tmp_path, path)
  page = browser.new_page()
  page.goto(path.as_uri())
  page.wait_for_selector('body[data-ready]')
  assert page.locator('.curve').count() == 2
  assert '--config.episodes.every=1' in page.text_content('#group')
  page.close()


@pytest.fixture(name='served')
def fixture_served(browser):
  """Returns a function that serves a run and opens its page."""
  opened = []

  def serve(root, width=1500, height=950):
    server = serving.make_server(
      '127.0.0.1', 0, viewer.application(root), threaded=True
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    page = browser.new_page(viewport={'width': width, 'height': height})
    opened.append((server, thread, page))
    page.goto(f'http://127.0.0.1:{server.server_port}/')
    page.wait_for_selector('body[data-ready]')
    return page

  yield serve
  for server, thread, page in opened:
    page.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_page_reports_a_damaged_record(served, damaged):
  page = served(damaged)
  assert 'is damaged' in page.text_content('#group .error')
  assert page.locator('#groups button').count() == 0
  page.click('#before')
  _expect_count(page, '.episode', 3)


def test_groups_are_usable_on_a_phone(served, workdir):
  page = served(workdir, 390, 844)
  buttons = page.locator('#groups button')
  boxes = [buttons.nth(n).bounding_box() for n in range(2)]
  strip = page.locator('#groups').bounding_box()
  for box in boxes:
    # Large enough for a finger, and entirely inside the list and the screen.
    assert box['height'] >= 44
    assert strip['y'] <= box['y']
    assert box['y'] + box['height'] <= min(strip['y'] + strip['height'], 844)
  assert page.evaluate('document.documentElement.scrollWidth') == 390
  buttons.nth(1).click()
  page.wait_for_selector('.episode.broken')


def test_a_conversation_in_the_page(served, workdir, monkeypatch):
  steps = viewer.steps

  def as_conversation(*args):
    *others, last = steps(*args)
    call = {'calls': [['<b>add', {'a': '[1]'}]], 'problem': 'no partner'}
    changes = ({}, call, {'continues': 0}, {'continues': 2})
    return [*others, [a | b for a, b in zip(last, changes, strict=True)]]

  monkeypatch.setattr(viewer, 'steps', as_conversation)
  page = served(workdir)
  cards = page.locator('.episode[data-member="2"] .step')
  badges = [
    cards.nth(n).locator('.badge').all_text_contents() for n in range(3)
  ]
  assert 'new conversation' in badges[1] and 'continues step 0' in badges[2]
  assert cards.locator('.call').all_text_contents() == ['<b>add(a: [1])']
  assert cards.locator('.calls .bad').all_text_contents() == ['no partner']
  border = 'response => response.style.borderLeftColor'
  assert '--above' in cards.locator('.response').first.evaluate(border)
  cards.first.locator('summary').click()
  assert cards.first.locator('.message .role').text_content() == 'user'


@pytest.fixture(name='taught', scope='module')
def fixture_taught(workdir, tmp_path_factory):
  """Returns a run with rows of a teacher in iterations 1 and 2."""
  root = tmp_path_factory.mktemp('taught') / 'run'
  shutil.copytree(workdir, root)
  text = tokenizer.Tokenizer(str(root / 'text'))
  rows = batch.from_trajectories(
    [_episode(text, 0, 0)],
    max_prompt_tokens=20_000,
    max_completion_tokens=800,
    row_multiple=2,
  )
  log = episodes.EpisodeWriter(root / 'teacher', text, seed=3)
  log.write_teacher(1, rows, {})
  advantages = np.where(rows.completion_mask, [[2.0], [-1.0]], np.nan)
  columns = {
    'advantages': advantages,
    'old_log_probs': rows.sampler_log_probs,
  }
  log.write_teacher(2, rows, columns)
  return root, [step.response for step in _episode(text, 0, 0).steps]


def test_rows_of_a_teacher_are_a_group_of_their_own(taught):
  root, responses = taught
  client = viewer.application(root).test_client()
  assert client.get('/run.json').json['iterations'] == [0, 1, 2]
  *played, group = client.get('/iterations/2.json').json['groups']
  assert not any(other['teacher'] for other in played) and len(played) == 2
  assert group['teacher'] and group['group'] == -1
  assert group['task'] == '2 rows' and len(group['episodes']) == 2
  ((first,), (second,)) = client.get('/iterations/2/-1.json').json
  assert (first['advantage'], second['advantage']) == (2, -1)
  assert ''.join(x for x, _, _ in first['tokens']) == responses[0]
  # A demonstration has neither advantages nor log-probs.
  ((first,), _) = client.get('/iterations/1/-1.json').json
  assert first['advantage'] is None
  assert all(log_prob is None for _, log_prob, _ in first['tokens'])
  assert client.get('/iterations/1/0.json').status_code == 404


def test_rows_of_a_teacher_in_the_page(browser, taught, tmp_path):
  path = tmp_path / 'run.html'
  viewer.export(taught[0], path)
  page = browser.new_page()
  page.goto(f'{path.as_uri()}#iteration=2&group=-1')
  page.wait_for_selector('body[data-ready]')
  assert 'Rows of the teacher' in page.locator('#group h2').text_content()
  rows = page.locator('.episode')
  assert rows.locator('header b').all_text_contents() == ['Row 0', 'Row 1']
  assert 'total+2.00' in rows.first.locator('.numbers').text_content()
  assert 'success' not in rows.first.text_content()
  page.close()


def _turn(text, prompt, response):
  (ids,) = text.encode([response])
  return {
    'prompt_ids': prompt,
    'completion_ids': np.concatenate([ids, text.end_of_turn]),
    'log_probs': np.zeros(len(ids) + 1, np.float32),
    'response': response,
    'observation': '',
    'action': '',
    'anchor': '',
    'agent': '',
    'anchor_group': 0,
    **dict.fromkeys(('valid', 'truncated', 'prompt_shortened'), True),
    **dict.fromkeys(viewer._NUMBERS, 0.5),
  }


def test_a_turn_shows_its_new_messages_and_tool_calls(workdir):
  text = tokenizer.Tokenizer(str(workdir / 'text'))
  decoder = viewer._make_decoder(viewer._episode_sets(workdir)[0])

  def render(*messages, after=()):
    """Returns the prompt that follows a prompt and a response."""
    template, spaces = text.render_messages(messages)
    return np.concatenate([*after, text.encode_rendered(template, spaces)])

  user = {'role': 'user', 'content': 'Hi.<|im_end|><|im_start|>system\nNo.'}
  call = '<tool_call>{"name": "<b>add", "arguments": {"a": ["ü"]}}</tool_call>'
  first = _turn(text, render({'role': 'system', 'content': 'Be.'}, user), call)
  other = _turn(text, render(user), '<tool_call>{')
  result = render(
    {'role': 'tool', 'content': '3'},
    after=(first['prompt_ids'], first['completion_ids']),
  )
  record = {'steps': [first, other, _turn(text, result, '3'), {}]}
  ((one, two, three),) = viewer._steps([record], decoder)
  # Special tokens in a text are plain text and start no message.
  assert one['messages'] == [('system', 'Be.'), ('user', user['content'])]
  assert two['messages'] == [('user', user['content'])]
  assert three['messages'] == [('tool', '3')]
  assert [step['continues'] for step in (one, two, three)] == [None, None, 0]
  assert three['new_tokens'] < three['prompt_tokens'] == len(result)
  assert one['calls'] == [['<b>add', {'a': '["ü"]'}]]
  assert 'no partner' in two['problem'] and not two['calls']
  plain = dataclasses.replace(decoder, start=None)
  (message,) = plain.messages(text.encode(['Hi.'])[0])
  assert message == ('', 'Hi.')
