"""Plays an episode by hand, in the terminal.

  python -m envs.play alfworld --split valid_seen --index 3
  python -m envs.play webshop --prompt
  python -m envs.play sokoban --set num_boxes=1 --set "size=(7, 7)"

Each typed line is an action. It is wrapped in tags and sent to the environment
like a policy's response. A line that contains `<action>` is sent unchanged, and
so is every line if the policy acts by tool calls. A line that starts with
another tag, such as `<search>words</search>`, only gets a thought in front.
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
Type an action, or a command:
  :actions  list the admissible actions
  :prompt   show the policy's prompt
  :quit     leave the episode"""

_INTERRUPTED = 130  # exit status after Ctrl-C: 128 + SIGINT


def respond(line: str) -> str:
  """Returns a typed line as a policy's response."""
  if '<action>' in line:
    return line
  action = line if line.startswith('<') else f'<action>{line}</action>'
  return f'<think>Played by hand.</think>{action}'


def play(
  env: base.Env,
  task: base.Task,
  *,
  show_prompt: bool = False,
  uses_tools: bool = False,
) -> None:
  """Plays an episode with actions from standard input.

  Args:
    env: the environment.
    task: the task to play.
    show_prompt: whether to print the policy's prompt at each turn, instead of
      the environment's text.
    uses_tools: whether lines are sent unchanged, see `envs.uses_tools`.

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
    result = env.step(line if uses_tools else respond(line))
    steps, reward = steps + 1, reward + result.reward
    if not result.valid:
      print('(The response has an invalid format.)')
    observation = result.observation
  score = '' if result.score is None else f', score {result.score:.3f}'
  outcome = 'Success' if result.success else 'No success'
  print(f'{outcome} after {steps} steps, reward {reward:g}{score}.')


def _ask(observation: base.Observation) -> str | None:
  """Reads lines until one is an action and returns it; None for `:quit`."""
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
  """Parses `name=value`; a value that is no Python literal stays a string."""
  name, equals, value = text.partition('=')
  if not equals:
    raise argparse.ArgumentTypeError(f'{text}: must be NAME=VALUE')
  try:
    return name, ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return name, value


def _make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m envs.play', description='Play an episode by hand.'
  )
  parser.add_argument(
    'environment',
    help=f'one of {", ".join(sorted(envs.REGISTRY))}, or a module name',
  )
  parser.add_argument('--split', default='train')
  parser.add_argument('--index', type=int, default=0, help='index of the task')
  parser.add_argument(
    '--data_dir',
    help="data folder; default: $ALFWORLD_DATA etc.; 'generated' for no data",
  )
  parser.add_argument('--max_steps', type=int, help='step limit')
  parser.add_argument(
    '--prompt', action='store_true', help="show the policy's prompts"
  )
  parser.add_argument(
    '--set',
    action='append',
    default=[],
    type=_setting,
    metavar='NAME=VALUE',
    help="further argument of the environment's Env; a Python literal",
  )
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the command line and plays; returns the exit status."""
  parser = _make_parser()
  options = vars(parser.parse_args(argv))
  settings = dict(options.pop('set'))
  name, prompt = options.pop('environment'), options.pop('prompt')
  task = base.Task(options.pop('split'), options.pop('index'))
  try:
    if envs.data(name):
      # Without a data folder the environment generates its tasks.
      options['data_dir'] = envs.data_dir(name, options['data_dir']) or None
  except ValueError as error:
    parser.error(str(error))
  flags = {key: value for key, value in options.items() if value is not None}
  with contextlib.suppress(AttributeError):  # pytest replaces the stream
    sys.stdin.reconfigure(errors='replace')
  kwargs = flags | settings
  problems = [*envs.check_options(name, kwargs)]
  if problems := problems or [*envs.check_installation(name, kwargs)]:
    parser.error('; '.join(problems))
  try:
    listed = envs.tasks(name, task.split, **kwargs)
    num_tasks = envs.count(name, task.split, listed)
    if not 0 <= task.index < num_tasks:
      parser.error(
        f'--index={task.index}: split {task.split} has {num_tasks} tasks; must '
        f'be from 0 to {num_tasks - 1}'
      )
    uses_tools = envs.uses_tools(name, kwargs)
    env = envs.make(name, **kwargs)
  except (TypeError, ValueError) as error:
    parser.error(str(error))
  try:
    play(env, task, show_prompt=prompt, uses_tools=uses_tools)
  except EOFError:
    print('\nLeft.')
  except KeyboardInterrupt:
    print('\nLeft.')
    return _INTERRUPTED
  except (ConnectionError, TimeoutError, ValueError) as error:
    sys.stderr.write(f'{error}\n')
    return 2
  finally:
    env.close()
  return 0


if __name__ == '__main__':
  sys.exit(main())
