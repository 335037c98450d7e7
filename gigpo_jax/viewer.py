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
import ipaddress
import json
import math
import pathlib
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib import parse

import flask
import jinja2
import tokenizers
import tqdm
from markupsafe import Markup
from werkzeug import exceptions, serving

from gigpo_jax import episodes, files, metrics

_PAGE = pathlib.Path(__file__).parent / 'page'

# A character of UTF-8 is at most as many bytes, a token at least one.
_CHARACTER_BYTES = 4

# Of an exported page; browsers take long for more.
_MAX_EXPORT_BYTES = 256 << 20

# Level 9 makes the file 7 % smaller and takes twice as long.
_GZIP_LEVEL = 6

_Decode = Callable[[Sequence[int]], str]

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
      config = files.read_stored(root / 'config.json')
    except ValueError as error:
      raise ValueError(
        f'--workdir={workdir}: config.json cannot be read ({error}); must be '
        'as the run wrote it, or gone'
      ) from error
  parts = {name: config.get(name) for name in ('env', 'algorithm')}
  names = {
    name: part.get('name') if isinstance(part, dict) else None
    for name, part in parts.items()
  }
  facts = {
    'environment': names['env'],
    'variant': config.get('variant'),
    'algorithm': names['algorithm'],
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
    ValueError: in one line, if they cannot be read.
  """
  found = _kept(workdir).groups(number, tokens=False)
  return _iteration(number, [_group(records) for records in found])


def steps(
  workdir: str | pathlib.Path, number: int, group: int
) -> list[list[dict[str, Any]]]:
  """Returns the steps of each episode of a group.

  Raises:
    KeyError: if they were not kept.
    ValueError: in one line, if they cannot be read.
  """
  kept = _kept(workdir)
  return _steps(kept.read(number, group), *_decoders(kept))


def _iteration(number: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
  return {'iteration': number, 'groups': groups}


def _group(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
  first = records[0]
  return {
    'group': int(first['group']),
    'task': f'{first["task_split"]}/{first["task_index"]}',
    'kind': first['kind'],
    'episodes': [_outline(record) for record in records],
  }


def _steps(
  records: Sequence[dict[str, Any]],
  decode: _Decode,
  piece: _Decode,
) -> list[list[dict[str, Any]]]:
  return [
    [_step(step, decode, piece) for step in record['steps'][:-1]]
    for record in records
  ]


def _decoders(kept: episodes.EpisodeSet) -> tuple[_Decode, _Decode]:
  """Returns what makes ids text: long ones, and pieces that come often.

  Raises:
    ValueError: in one line, if the tokenizer cannot be read.
  """
  path = kept.directory / 'tokenizer' / 'tokenizer.json'
  try:
    text = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The library raises nothing narrower.
    raise ValueError(
      f'{path}: cannot be read ({error}); copy the tokenizer.json of the '
      "run's policy there"
    ) from error

  def decode(ids: Sequence[int]) -> str:
    return text.decode(list(ids), skip_special_tokens=False)

  return decode, functools.cache(decode)


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
  decode: _Decode,
  piece: _Decode,
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
  decode: _Decode,
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
  packed = gzip.compress(_json(part).encode(), _GZIP_LEVEL, mtime=0)
  return base64.b64encode(packed).decode()


def _json(part: Any) -> str:
  """Returns JSON; raises ValueError for numbers that browsers cannot read."""
  return json.dumps(part, allow_nan=False)


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
  if chosen:
    kept = _kept(workdir)
    decoders = _decoders(kept)
  for number in tqdm.tqdm(chosen, unit='iteration', disable=None):
    groups = []
    for records in kept.groups(number):
      groups.append(_group(records))
      name = f'iterations/{number}/{groups[-1]["group"]}'
      parts[name] = _packed(_steps(records, *decoders))
      size += len(parts[name])
    parts[f'iterations/{number}'] = _packed(_iteration(number, groups))
    if size > _MAX_EXPORT_BYTES:
      raise ValueError(
        f'--export={path}: more than {_MAX_EXPORT_BYTES >> 20} MiB with '
        f'iteration {number}; name fewer with --iterations'
      )
  pathlib.Path(path).write_text(page(run['name'], parts), encoding='utf-8')


def serve(
  workdir: str | pathlib.Path, host: str, port: int, names: Sequence[str] = ()
) -> None:
  """Serves the page until it is interrupted; prints the address.

  Args:
    workdir: of the run.
    host: address to listen at; `::` and `0.0.0.0` are all of the machine's.
    port: to listen at; 0: a free one.
    names: further names that the page may be asked for by, as of a proxy.

  Raises:
    ValueError: in one line, if there is no run, or the port is taken.
  """
  summary(workdir)
  # Not by werkzeug, which would end the process where the port is taken.
  ipv6 = ':' in host
  try:
    listening = socket.create_server(
      (host, port),
      family=socket.AF_INET6 if ipv6 else socket.AF_INET,
      dualstack_ipv6=host == '::' and socket.has_dualstack_ipv6(),
    )
  except OSError as error:
    raise ValueError(
      f'--port={port}: cannot be used at {host} ({error.strerror}); give '
      'another one, or --port=0 for any free port'
    ) from error
  with listening:
    port = listening.getsockname()[1]
    server = serving.make_server(
      host,
      port,
      application(workdir, (host, *names)),
      threaded=True,
      fd=listening.fileno(),
    )
  print(f'http://{f"[{host}]" if ipv6 else host}:{port}/', flush=True)
  server.serve_forever()


def trusted(header: str, names: Iterable[str]) -> bool:
  """Returns whether a Host header names this machine.

  A web page elsewhere can give its own name this machine's address, and then
  read what is served here (DNS rebinding); the browser still sends that name.
  An address has no name to give, so every address is this machine's.

  Args:
    header: its value, `NAME` or `NAME:PORT`.
    names: of this machine.
  """
  try:
    name = parse.urlsplit(f'//{header}').hostname or ''
  except ValueError:
    return False
  try:
    ipaddress.ip_address(name)
  except ValueError:
    return name.removesuffix('.') in {known.lower() for known in names}
  return True


def application(
  workdir: str | pathlib.Path, names: Sequence[str] = ()
) -> flask.Flask:
  """Returns what serves the page, and parts of the run as it asks for them.

  Args:
    workdir: of the run.
    names: names of this machine besides `localhost` and its host name, under
      any of which the page may be asked for; see `trusted`.
  """
  app = flask.Flask(__name__, static_folder=None)
  known = ('localhost', socket.gethostname(), *names)

  @app.before_request
  def _check_host():
    header = flask.request.headers.get('Host', '')
    if not trusted(header, known):
      flask.abort(
        400, f'Host {header}: not a name of this machine; see --names'
      )

  @app.after_request
  def _harden(response):
    response.headers['X-Content-Type-Options'] = 'nosniff'
    return response

  @app.get('/')
  def _page():
    return page(pathlib.Path(workdir).resolve().name)

  @app.get('/run.json')
  def _run():
    return _answer(summary(workdir))

  @app.get('/iterations/<int:number>.json')
  def _of_iteration(number: int):
    return _answer(iteration(workdir, number))

  @app.get('/iterations/<int:number>/<int:group>.json')
  def _of_group(number: int, group: int):
    return _answer(steps(workdir, number, group))

  app.register_error_handler(Exception, _failure)
  return app


def _failure(error: Exception) -> flask.Response:
  """Returns the answer to a request that failed; the page shows its text."""
  if isinstance(error, exceptions.HTTPException):
    return _answer({'error': error.description}, error.code or 500)
  if isinstance(error, KeyError):
    return _answer({'error': f'{error}: no such episodes were kept'}, 404)
  if isinstance(error, (ValueError, OSError)):
    return _answer({'error': str(error)}, 500)
  flask.current_app.logger.error('a request failed', exc_info=error)
  return _answer({'error': f'{type(error).__name__}: {error}'}, 500)


def _answer(part: Any, status: int = 200) -> flask.Response:
  return flask.Response(_json(part), status, mimetype='application/json')
