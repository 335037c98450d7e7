"""A page that shows a run: learning curves, and what was said, token by token.

Reads a work directory: metrics.jsonl, config.json, and episodes/ if the run
kept any. Served from this machine (`application`), a part at a time, or as one
file with everything in it (`export`). The page puts texts of models and
environments into the document as text only, runs no script but its own, by a
policy that names that one's hash, and asks no other machine for anything.
"""

import base64
import functools
import gzip
import hashlib
import json
import math
import pathlib
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flask
import jinja2
import tokenizers
import tqdm
from markupsafe import Markup
from werkzeug import serving

from gigpo_jax import episodes, files, metrics

_PAGE = pathlib.Path(__file__).parent / 'page'

# A character of UTF-8 is at most as many bytes, a token at least one.
_CHARACTER_BYTES = 4

# Of an exported page; browsers take long for more.
_MAX_EXPORT_BYTES = 256 << 20

_LOOPBACK = ('127.0.0.1', 'localhost')

# Fields of a step that are shown as they are, and those that are numbers.
_TEXTS = ('observation', 'action', 'anchor')
_FLAGS = ('valid', 'truncated', 'prompt_shortened')
_NUMBERS = (
  'reward',
  'discounted_return',
  'episode_advantage',
  'step_advantage',
  'advantage',
)


def summary(workdir: str | pathlib.Path) -> dict[str, Any]:
  """Returns what the page has to know of a run at once.

  Raises:
    ValueError: in one line, if there is no run.
  """
  root = pathlib.Path(workdir)
  lines, kept = metrics.read(root), _episodes(root)
  if not lines and kept is None:
    raise ValueError(
      f'--workdir={workdir}: no run there; needs metrics.jsonl or episodes'
    )
  config = {}
  if (root / 'config.json').is_file():
    try:
      config = files.read_object(root / 'config.json')
    except ValueError as error:
      raise ValueError(
        f'--workdir={workdir}: config.json cannot be read ({error}); must be '
        'as the run wrote it, or gone'
      ) from error
  facts = {
    'environment': config.get('env', {}).get('name'),
    'variant': config.get('variant'),
    'algorithm': config.get('algorithm', {}).get('name'),
    'seed': config.get('seed'),
  }
  return {
    'name': root.resolve().name,
    'facts': {
      name: value for name, value in facts.items() if value is not None
    },
    'metrics': lines,
    'iterations': kept.iterations if kept else [],
  }


def iteration(workdir: str | pathlib.Path, number: int) -> dict[str, Any]:
  """Returns the groups of an iteration: tasks, and how episodes went.

  Raises:
    KeyError: if they were not kept.
  """
  groups: dict[int, dict[str, Any]] = {}
  for record in _kept(workdir).read(number, tokens=False):
    place = int(record['group'])
    task = {
      'group': place,
      'task': f'{record["task_split"]}/{record["task_index"]}',
      'kind': record['kind'],
      'episodes': [],
    }
    groups.setdefault(place, task)['episodes'].append(_outline(record))
  return {'iteration': number, 'groups': [groups[n] for n in sorted(groups)]}


def steps(
  workdir: str | pathlib.Path, number: int, group: int
) -> list[list[dict[str, Any]]]:
  """Returns the steps of each episode of a group.

  Raises:
    KeyError: if they were not kept.
  """
  kept = _kept(workdir)
  path = kept.directory / 'tokenizer' / 'tokenizer.json'
  text = tokenizers.Tokenizer.from_file(str(path))

  def decode(ids: Sequence[int]) -> str:
    return text.decode(list(ids), skip_special_tokens=False)

  piece = functools.cache(decode)
  return [
    [_step(step, decode, piece) for step in record['steps'][:-1]]
    for record in kept.read(number, group)
  ]


def _kept(workdir: str | pathlib.Path) -> episodes.EpisodeSet:
  kept = _episodes(pathlib.Path(workdir))
  if kept is None:
    raise KeyError(workdir)
  return kept


def _episodes(root: pathlib.Path) -> episodes.EpisodeSet | None:
  directory = root / episodes.FOLDER
  kept = (directory / episodes.INFO).is_file()
  return episodes.open_set(directory) if kept else None


def _outline(record: dict[str, Any]) -> dict[str, Any]:
  *taken, closing = record['steps']
  return {
    'member': int(record['member']),
    'success': bool(record['success']),
    'return': _number(record['return']),
    'score': _number(record['score']),
    'failure': record['failure'],
    'trained': bool(record['trained']),
    'invalid': sum(not step['valid'] for step in taken),
    'length': len(taken),
    'end': closing['anchor'],
  }


def _step(
  step: dict[str, Any],
  decode: Callable[[Sequence[int]], str],
  piece: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
  return (
    {name: step[name] for name in _TEXTS}
    | {name: bool(step[name]) for name in _FLAGS}
    | {name: _number(step[name]) for name in _NUMBERS}
    | {
      'state': int(step['anchor_group']),
      'prompt': decode(step['prompt_ids'].tolist()),
      'prompt_tokens': len(step['prompt_ids']),
      'tokens': spans(
        piece, step['completion_ids'].tolist(), step['log_probs'].tolist()
      ),
    }
  )


def spans(
  decode: Callable[[Sequence[int]], str],
  ids: Sequence[int],
  log_probs: Sequence[float],
) -> list[tuple[str, float | None, int]]:
  """Returns (text, log-probability, number of tokens), token by token.

  Tokens that are parts of one character come together. A log-probability that
  is not finite is None, as of a policy that has diverged.
  """
  found, held, total = [], [], 0.0
  for n, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True), 1):
    held.append(token)
    total += log_prob
    text = decode(tuple(held))
    whole = not text.endswith('\ufffd') or len(held) == _CHARACTER_BYTES
    if whole or n == len(ids):
      found.append((text, _number(total), len(held)))
      held, total = [], 0.0
  return found


def _number(value: float) -> float | None:
  return round(float(value), 5) if math.isfinite(value) else None


def page(title: str, parts: dict[str, str] | None = None) -> str:
  """Returns the page as HTML.

  Args:
    title: of the window.
    parts: what it would ask for, by path, packed, to be put into it; None: it
      asks.
  """
  texts = {
    name: (_PAGE / f'page.{name}').read_text(encoding='utf-8')
    for name in ('css', 'js')
  }
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_PAGE),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
  )
  return environment.get_template('page.html').render(
    title=title,
    policy=_policy(texts),
    css=Markup(texts['css']),
    js=Markup(texts['js']),
    parts=parts or {},
  )


def _policy(texts: dict[str, str]) -> str:
  hashes = {
    name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    for name, text in texts.items()
  }
  return (
    f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    f"form-action 'none'; style-src 'sha256-{hashes['css']}'; "
    f"script-src 'sha256-{hashes['js']}'"
  )


def _packed(part: Any) -> str:
  """Returns JSON as base64 of gzip, which holds no character of HTML's."""
  text = json.dumps(part, allow_nan=False)
  return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def export(
  workdir: str | pathlib.Path,
  path: str | pathlib.Path,
  iterations: Iterable[int] = (),
) -> None:
  """Writes the page with everything in it as one HTML file.

  Args:
    workdir: of the run.
    path: of the file.
    iterations: whose episodes to put in; none: of all that were kept.

  Raises:
    ValueError: in one line, if there is no run, an iteration is missing, or the
      file would be too large for a browser.
  """
  run = summary(workdir)
  chosen = list(iterations) or run['iterations']
  for number in chosen:
    if number not in run['iterations']:
      kept = ', '.join(map(str, run['iterations'])) or 'none'
      raise ValueError(
        f'--iterations={number}: its episodes were not kept; there are {kept}'
      )
  run['iterations'] = chosen
  parts, size = {'run': _packed(run)}, 0
  for number in tqdm.tqdm(chosen, unit='iteration', disable=None):
    found = iteration(workdir, number)
    parts[f'iterations/{number}'] = _packed(found)
    for group in found['groups']:
      name = f'iterations/{number}/{group["group"]}'
      parts[name] = _packed(steps(workdir, number, group['group']))
      size += len(parts[name])
    if size > _MAX_EXPORT_BYTES:
      raise ValueError(
        f'--export={path}: more than {_MAX_EXPORT_BYTES >> 20} MiB with '
        f'iteration {number}; name fewer with --iterations'
      )
  pathlib.Path(path).write_text(page(run['name'], parts), encoding='utf-8')


def serve(workdir: str | pathlib.Path, host: str, port: int) -> None:
  """Serves the page until it is interrupted; says where.

  Raises:
    ValueError: in one line, if there is no run.
    OSError: if the port is taken.
  """
  summary(workdir)
  # By itself: werkzeug would end the process where the port is taken.
  with socket.create_server((host, port)) as listening:
    port = listening.getsockname()[1]
    server = serving.make_server(
      host,
      port,
      application(workdir, host),
      threaded=True,
      fd=listening.fileno(),
    )
  print(f'http://{host}:{port}/', flush=True)
  server.serve_forever()


def application(
  workdir: str | pathlib.Path, host: str = '127.0.0.1'
) -> flask.Flask:
  """Returns what serves the page, and parts of the run as it asks for them."""
  app = flask.Flask(__name__, static_folder=None)
  if host in _LOOPBACK:
    # A page from elsewhere whose name is made to lead here gets nothing.
    app.config['TRUSTED_HOSTS'] = list(_LOOPBACK)

  @app.get('/')
  def _page():
    return page(summary(workdir)['name'])

  @app.get('/run.json')
  def _run():
    return summary(workdir)

  @app.get('/iterations/<int:number>.json')
  def _iteration(number: int):
    return iteration(workdir, number)

  @app.get('/iterations/<int:number>/<int:group>.json')
  def _steps(number: int, group: int):
    return steps(workdir, number, group)

  @app.errorhandler(KeyError)
  def _missing(error):
    return {'error': f'{error}: no such episodes were kept'}, 404

  return app
