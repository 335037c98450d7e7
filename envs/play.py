"""Lets a person play an episode in the terminal.

  python -m envs.play alfworld --split valid_seen --index 3
  python -m envs.play webshop --prompt
  python -m envs.play sokoban --set num_boxes=1 --set "size=(7, 7)"

Lines typed are actions and go to the environment as a policy's would, wrapped
in the form that it asks for. A line that holds `<action>` goes as it is; one in
other tags, such as `<search>words</search>`, gets a thought before it.
"""

import argparse
import ast
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import envs
from envs import base

_HELP = """\
Type an action. Besides:
  :actions  lists what can be done
  :prompt   shows what a policy would see
  :quit     leaves"""

# The engine that needs nothing installed.
_DEFAULTS = {'alfworld': {'engine': 'native'}}
_INTERRUPTED = 130


def respond(line: str) -> str:
  """Returns a typed line as a response of a policy."""
  if '<action>' in line:
    return line
  action = line if line.startswith('<') else f'<action>{line}</action>'
  return f'<think>Played by hand.</think>{action}'


def play(env: base.Env, task: base.Task, *, show_prompt: bool = False) -> None:
  """Plays an episode with what comes from standard input.

  Args:
    env: the environment.
    task: the episode to play.
    show_prompt: whether to show, at each turn, what a policy would see.

  Raises:
    EOFError: if the input ends before the episode.
  """
  observation: base.Observation | None = env.reset(task)
  print(f'{_HELP}\n\n{task}: {observation.task}\n')
  steps, reward = 0, 0.0
  while observation is not None:
    print(f'{observation.prompt if show_prompt else observation.text}\n')
    line = _ask(observation)
    if line is None:
      print('Left.')
      return
    result = env.step(respond(line))
    steps, reward = steps + 1, reward + result.reward
    if not result.valid:
      print('(A response of invalid form.)')
    observation = result.observation
  score = '' if result.score is None else f', score {result.score:.3f}'
  outcome = 'Success' if result.success else 'No success'
  print(f'{outcome} after {steps} steps, reward {reward:g}{score}.')


def _ask(observation: base.Observation) -> str | None:
  """Returns the next line that is an action; None to leave."""
  while True:
    line = input('> ').strip()
    if line == ':quit':
      return None
    if line == ':actions':
      print('\n'.join(observation.actions) + '\n')
    elif line == ':prompt':
      print(f'{observation.prompt}\n')
    else:
      return line


def _setting(text: str) -> tuple[str, Any]:
  """Returns (name, value) of `name=value`; what is no Python is text."""
  name, equals, value = text.partition('=')
  if not equals:
    raise argparse.ArgumentTypeError(f'{text}: must be NAME=VALUE')
  try:
    return name, ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return name, value


def main(argv: Sequence[str] | None = None) -> int:
  """Plays; returns the exit status. See --help."""
  parser = argparse.ArgumentParser(
    prog='python -m envs.play', description='Play an episode by hand.'
  )
  parser.add_argument(
    'environment',
    help=f'one of {", ".join(sorted(envs.REGISTRY))}, or a module',
  )
  parser.add_argument('--split', default='train')
  parser.add_argument('--index', type=int, default=0, help='number of the task')
  parser.add_argument('--engine', help='of alfworld: native, textworld')
  parser.add_argument(
    '--data_dir',
    help="data; default: what $ALFWORLD_DATA or the like names; 'generated'",
  )
  parser.add_argument('--max_steps', type=int, help='turns of an episode')
  parser.add_argument('--prompt', action='store_true', help='show prompts')
  parser.add_argument(
    '--set',
    action='append',
    default=[],
    type=_setting,
    metavar='NAME=VALUE',
    help='another argument of the environment, a Python value',
  )
  options = vars(parser.parse_args(argv))
  others = dict(options.pop('set'))
  name, prompt = options.pop('environment'), options.pop('prompt')
  task = base.Task(options.pop('split'), options.pop('index'))
  if options['engine'] and name != 'alfworld':
    parser.error(f'--engine={options["engine"]}: {name} has only one')
  if name in envs.DATA_VARIABLES:
    # With no folder at all it is generated.
    options['data_dir'] = envs.data_dir(name, options['data_dir']) or None
  given = {key: value for key, value in options.items() if value is not None}
  with contextlib.suppress(AttributeError):  # tests put other streams there
    sys.stdin.reconfigure(errors='replace')
  kwargs = _DEFAULTS.get(name, {}) | given | others
  try:
    available = len(envs.tasks(name, task.split, **kwargs))
    if not 0 <= task.index < available:
      parser.error(
        f'--index={task.index}: split {task.split} has {available} tasks'
      )
    env = envs.make(name, **kwargs)
  except (TypeError, ValueError) as error:
    parser.error(str(error))
  try:
    play(env, task, show_prompt=prompt)
  except EOFError:
    print('\nLeft.')
  except KeyboardInterrupt:
    print('\nLeft.')
    return _INTERRUPTED
  finally:
    env.close()
  return 0


if __name__ == '__main__':
  sys.exit(main())
