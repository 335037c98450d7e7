"""Tests that run the files and commands of the documentation.

A block with a title is a file, and a `sh` block contains commands. The commands
of a page run in one empty folder.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import programs
import pytest
from programs import PROJECT

from envs import base, messages

NOTEBOOKS = ('gigpo_in_ten_minutes.ipynb', 'your_own_environment.ipynb')
BLOCK = re.compile(
  r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)
PAGES = {
  'library': ('[1.862, 0.707, -1.284, -1.284]', 'done=True', '<action>'),
  'environment': ('Success after 2', 'Lower.', 'warm start: ', 'EVAL success'),
  'new_algorithm': ('iteration    0', 'learning curve: '),
  'model': ('parameters', 'iteration    0', 'learning curve: '),
}


def _run(command: list[str], folder: pathlib.Path, **variables: str) -> str:
  defaults = {
    'PATH': f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}',
    'PYTHONPATH': str(PROJECT),
    'PYTHONWARNINGS': 'ignore',
  }
  return programs.run(command, folder, **defaults | variables)


@pytest.mark.slow
@pytest.mark.parametrize('name', PAGES)
def test_page_runs(tmp_path, name):
  page = (PROJECT / 'docs' / f'{name}.md').read_text()
  commands = []
  for language, title, text in BLOCK.findall(page):
    if title:
      (tmp_path / title).write_text(text)
    elif language == 'sh':
      commands.append(text)
  assert commands
  printed = _run(['bash', '-ec', '\n'.join(commands)], tmp_path)
  for words in PAGES[name]:
    assert words in printed


@pytest.mark.slow
def test_example_of_another_trainer_learns():
  printed = _run([sys.executable, 'examples/other_trainer.py'], PROJECT)
  rates = [float(r) for r in re.findall(r'success (\d+)%', printed)]
  assert len(rates) == 20
  assert rates[0] < 80 and rates[-1] >= 90


@pytest.mark.slow
def test_example_of_an_own_loop_runs():
  printed = _run([sys.executable, 'examples/own_loop.py'], PROJECT)
  assert re.findall(r'iteration (\d): success', printed) == ['0', '1']
  losses = re.findall(r'loss ([+-][\d.]+)', printed)
  assert any(float(loss) for loss in losses)


def test_links_between_pages_and_files_exist():
  for path in [PROJECT / 'README.md', *(PROJECT / 'docs').rglob('*.md')]:
    for target in re.findall(r'\]\(([^)#\s]+)', path.read_text()):
      if '://' not in target:
        assert (path.parent / target).exists(), f'{path.name}: {target}'


def _cells(name: str) -> list[str]:
  notebook = json.loads((PROJECT / 'notebooks' / name).read_text())
  return [''.join(cell['source']) for cell in notebook['cells']]


def test_notebook_has_the_environment_of_the_page():
  page = (PROJECT / 'docs' / 'environment.md').read_text()
  files = {title: text for _, title, text in BLOCK.findall(page) if title}
  cells = _cells('your_own_environment.ipynb')
  for name in ('guess.py', 'guess_config.py'):
    text = files[name]
    assert f'%%writefile {name}\n{text}'.rstrip() in cells


def test_mini_has_one_duration():
  pages = [PROJECT / 'README.md', PROJECT / 'configs' / 'sizes.py']
  pages += [*PROJECT.glob('docs/*.md'), *PROJECT.glob('notebooks/*.ipynb')]
  form = re.compile(r'about (\w+) minutes\s+o[fn]\s+one\s+CPU\s+core')
  durations = {p.name: set(form.findall(p.read_text())) for p in pages}
  stated = {name: found for name, found in durations.items() if found}
  assert stated.keys() >= {'README.md', 'running.md', 'sizes.py', 'index.md'}
  assert set().union(*stated.values()) == {'six'}, stated


def test_shortest_environment_is_complete():
  page = (PROJECT / 'docs' / 'environment.md').read_text()
  text = next(t for _, title, t in BLOCK.findall(page) if title == 'sticks.py')
  assert len([line for line in text.splitlines() if line.strip()]) <= 30
  assert 'narrator' not in text
  module = types.ModuleType('sticks')
  exec(compile(text, 'sticks.py', 'exec'), module.__dict__)
  tasks, env = module.tasks('train'), module.Env(max_steps=3)
  assert len(tasks) == 8 and {tasks.task_type(n) for n in range(8)} == {
    'even',
    'odd',
  }

  def send(call, value):
    """Returns an answer as the trainer receives it, checked."""
    answer = messages.encode(0, call, value)[messages.HEADER.size :]
    answer_type, decoded = messages.decode(answer, call)
    assert answer_type == messages.REPLY, decoded
    return decoded

  task = base.Task('train', 1)
  env.prepare(task)
  first = send('reset', env.reset(task))
  assert '4 sticks' in first.prompt and first == send('reset', env.reset(task))
  taken = send('step', env.step('<action>2</action>'))
  assert taken.valid and not taken.done and '2 sticks' in taken.observation.text
  wrong = send('step', env.step('none'))
  assert not wrong.valid and wrong.observation == taken.observation
  won = send('step', env.step('<action>2</action>'))
  assert won.success and won.done and won.reward == 10
  env.close()


@pytest.mark.parametrize('record', [base.Observation, base.StepResult])
def test_page_lists_every_field_with_its_type(record):
  page = (PROJECT / 'docs' / 'environment.md').read_text()
  section = page.partition(f'## {record.__name__}\n')[2].partition('\n## ')[0]
  rows = re.findall(r'^\| `(\w+)` \| `([^`]+)`(.*?) \| .+ \|$', section, re.M)
  listed = {name: (text.replace('\\|', '|'), rest) for name, text, rest in rows}
  fields = dataclasses.fields(record)
  assert list(listed) == [field.name for field in fields]
  for field in fields:
    listed_type, rest = listed[field.name]
    written = field.type if isinstance(field.type, str) else None
    assert listed_type == (written or _spelling(field.type))
    missing = dataclasses.MISSING
    optional = {field.default, field.default_factory} != {missing}
    assert ('default' in rest) == optional, field.name


def _spelling(field_type: type) -> str:
  text = (
    field_type.__name__ if isinstance(field_type, type) else str(field_type)
  )
  if isinstance(field_type, types.GenericAlias):
    text = str(field_type)
  return text.replace('envs.base.', '')


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_notebook_explains_a_failed_installation(tmp_path, name):
  install = _cells(name)[1]
  (url,) = re.findall(
    r"^URL = '(.*)'$", (PROJECT / 'setup.py').read_text(), re.M
  )
  assert f"'{url}'" in install
  # The project cannot be imported, as on Colab.
  script = tmp_path / 'cell.py'
  script.write_text(install.replace("'gigpo_jax'", "'no_such_package'"))
  done = subprocess.run(
    [sys.executable, str(script)],
    env=os.environ | {'GIGPO_JAX_REPOSITORY': (tmp_path / 'none').as_uri()},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode
  assert 'Set REPOSITORY above to the address' in done.stderr
  assert 'pip says' in done.stderr


def test_notebook_has_the_first_command_of_the_readme():
  readme = (PROJECT / 'README.md').read_text()
  first, *_ = re.findall(r'python launch/train.py (.*)', readme)
  (cell,) = [c for c in _cells('gigpo_in_ten_minutes.ipynb') if 'flags =' in c]
  flags = re.search(r'flags = \[(.*?)\]', cell, re.DOTALL).group(1)
  # The default of --workdir; later cells read that folder.
  assert set(re.findall(r"'(.*?)'", flags)) == {
    *first.split(),
    '--workdir=runs/alfworld-mini',
  }


@pytest.mark.slow
@pytest.mark.parametrize('name', NOTEBOOKS)
def test_notebook_runs_in_its_reduced_form(tmp_path, name):
  shutil.copy(PROJECT / 'notebooks' / name, tmp_path)
  _run(
    ['jupyter', 'execute', '--inplace', name],
    tmp_path,
    GIGPO_JAX_NOTEBOOK='short',
  )
  shown = (tmp_path / name).read_text()
  assert 'image/png' in shown and 'srcdoc' in shown
