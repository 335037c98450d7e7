"""Show a run as a web page: learning curves and episodes, token by token.

Input: a work directory with metrics.jsonl, config.json and, if the run kept
episodes, episodes/. Output: a Flask application that serves the data in parts
(`application`), or one self-contained HTML file (`export`).

The page inserts texts from models and environments as text only. Its content
security policy allows only its own script, by hash. The page makes no external
requests.
"""

import base64
import dataclasses
import functools
import gzip
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flask
import jinja2
import numpy as np
import tokenizers
import tqdm
from markupsafe import Markup
from werkzeug import exceptions, serving

from envs import tool_calls
from gigpo_jax import episode_records, episodes, metrics
from gigpo_jax.runtime import files, web

_PAGE = pathlib.Path(__file__).parent / 'page'
# Marks exported pages; see page.html.
_GENERATOR = b'<meta name="generator" content="gigpo_jax">'

# A UTF-8 character has at most 4 bytes, and a token has at least one byte.
_CHARACTER_BYTES = 4

# Maximum size of an exported page; browsers load larger pages slowly.
_MAX_EXPORT_BYTES = 256 << 20

# Level 9 would make the file 7 % smaller, but takes twice as long.
_GZIP_LEVEL = 6

_Decode = Callable[[Sequence[int]], str]

# Fields of a step, by how the page shows them: text, flag or number.
_TEXTS = ('observation', 'action', 'anchor', 'agent')
_FLAGS = ('valid', 'truncated', 'prompt_shortened')
_NUMBERS = (
  'reward',
  'discounted_return',
  'episode_advantage',
  'step_advantage',
  'advantage',
)


def summary(workdir: str | pathlib.Path) -> dict[str, Any]:
  """Returns the overview of a run that the page loads first.

  Raises:
    ValueError: in one line, if the folder holds no run.
  """
  root = pathlib.Path(workdir)
  metric_lines, episode_sets = metrics.read(root), _episode_sets(root)
  if not metric_lines and not episode_sets:
    if (root / 'config.json').is_file():
      raise ValueError(
        f'--workdir={workdir}: the run has no finished iteration yet; try '
        'again after the first'
      )
    kept = sorted(root.glob(f'evaluation/*/{episodes.FOLDER}'))
    hint = f'; did you mean --workdir={kept[0].parent}?' if kept else ''
    raise ValueError(
      f'--workdir={workdir}: holds no run; must have metrics.jsonl or episodes/'
      f'{hint}'
    )
  config = {}
  if (root / 'config.json').is_file():
    try:
      config = files.read_stored(root / 'config.json')
    except ValueError as error:
      raise ValueError(
        f'--workdir={workdir}: config.json cannot be read ({error}); '
        'restore or delete it'
      ) from error
  sections = {name: config.get(name) for name in ('env', 'algorithm')}
  section_names = {
    name: part.get('name') if isinstance(part, dict) else None
    for name, part in sections.items()
  }
  facts = {
    'environment': section_names['env'],
    'variant': config.get('variant'),
    'algorithm': section_names['algorithm'],
    'seed': config.get('seed'),
  }
  return {
    'name': root.resolve().name,
    'facts': {
      name: value for name, value in facts.items() if value is not None
    },
    'metrics': metric_lines,
    'iterations': sorted({n for kept in episode_sets for n in kept.iterations}),
  }


def iteration(workdir: str | pathlib.Path, number: int) -> dict[str, Any]:
  """Returns the groups of an iteration: tasks and episode outcomes.

  Raises:
    KeyError: if the run did not keep the iteration's episodes.
    ValueError: in one line, if the episodes cannot be read.
  """
  groups = [
    _group(records)
    for episode_set in _sets_with(workdir, number)
    for records in episode_set.groups(number, tokens=False)
  ]
  return _iteration(number, groups)


def steps(
  workdir: str | pathlib.Path, number: int, group: int
) -> list[list[dict[str, Any]]]:
  """Returns the steps of each episode of a group.

  Raises:
    KeyError: if the run did not keep the group's episodes.
    ValueError: in one line, if the episodes cannot be read.
  """
  for episode_set in _sets_with(workdir, number):
    folder = episode_set.directory
    changed = (folder / episodes.INFO).stat().st_mtime_ns
    if positions := _positions(folder, number, changed).get(group):
      records = episode_set.read_at(positions)
      return _steps(records, _make_decoder(episode_set))
  raise KeyError(group)


@functools.lru_cache(maxsize=64)
def _positions(
  folder: pathlib.Path, number: int, changed: int
) -> dict[int, list[int]]:
  """Returns the positions of each group; a text search needs all groups.

  Args:
    folder: folder of a set.
    number: index of the iteration.
    changed: when the set was last changed.
  """
  del changed  # Only a part of the cache's key.
  return episodes.open_dataset(folder).group_positions(number)


def _iteration(number: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
  return {'iteration': number, 'groups': groups}


def _group(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
  first = records[0]
  is_teacher = int(first['group']) == episode_records.TEACHER
  task = f'{first["task_split"]}/{first["task_index"]}'
  return {
    'group': int(first['group']),
    'teacher': is_teacher,
    'task': f'{len(records)} rows' if is_teacher else task,
    'kind': first['kind'],
    'episodes': [_episode_outline(record) for record in records],
  }


def _steps(
  records: Sequence[dict[str, Any]], decoder: '_Decoder'
) -> list[list[dict[str, Any]]]:
  return [
    [
      _step(step, record['steps'][:n], decoder)
      for n, step in enumerate(record['steps'][:-1])
    ]
    for record in records
  ]


@dataclasses.dataclass(frozen=True)
class _Decoder:
  """Decodes token ids.

  Attributes:
    text: decodes long texts.
    piece: decodes single tokens, which occur often; cached.
    start: token that starts a message; None if the tokenizer has none.
    end: token that ends a message.
  """

  text: _Decode
  piece: _Decode
  start: int | None
  end: int | None

  def messages(self, ids: np.ndarray) -> list[tuple[str, str]]:
    """Returns the (role, text) of each message of a prompt or of its end.

    The role is '' where the prompt is not in the ChatML format. The start of
    the response, if empty, is left out.
    """
    if self.start is None:
      return [('', self.text(ids.tolist()))]
    before, *parts = np.split(ids, np.flatnonzero(ids == self.start))
    # A continued conversation begins with the end of the last response.
    rest = self.text(before[before != self.end].tolist())
    found = [('', rest)] if rest.strip() else []
    for part in parts:
      (ends,) = np.nonzero(part == self.end)
      body = part[1 : ends[0] if len(ends) else len(part)]
      role, _, text = self.text(body.tolist()).partition('\n')
      found.append((role, text))
    if found and found[-1] == ('assistant', ''):
      found.pop()
    return found


def _make_decoder(episode_set: episodes.EpisodeDataset) -> _Decoder:
  """Returns the decoder of a run's tokens.

  Raises:
    ValueError: in one line, if the tokenizer cannot be read.
  """
  path = episode_set.directory / 'tokenizer' / 'tokenizer.json'
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The library raises nothing narrower.
    raise ValueError(
      f'{path}: cannot be read ({error}); copy the tokenizer.json of the '
      "run's policy there"
    ) from error

  def decode(ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)

  return _Decoder(
    decode,
    functools.cache(decode),
    tokenizer.token_to_id('<|im_start|>'),
    tokenizer.token_to_id('<|im_end|>'),
  )


def _sets_with(
  workdir: str | pathlib.Path, number: int
) -> list[episodes.EpisodeDataset]:
  """Returns the sets that hold an iteration.

  Raises:
    KeyError: if there is none.
  """
  sets = [
    episode_set
    for episode_set in _episode_sets(pathlib.Path(workdir))
    if number in episode_set.iterations
  ]
  if not sets:
    raise KeyError(number)
  return sets


def _episode_sets(root: pathlib.Path) -> list[episodes.EpisodeDataset]:
  """Returns the sets of a run: its episodes, and the rows of a teacher."""
  folders = [root / episodes.FOLDER, root / episodes.TEACHER_FOLDER]
  return [
    episodes.open_dataset(folder)
    for folder in folders
    if (folder / episodes.INFO).is_file()
  ]


def _episode_outline(record: dict[str, Any]) -> dict[str, Any]:
  *steps, end = record['steps']
  return {
    'member': int(record['member']),
    'success': bool(record['success']),
    'return': _finite_or_none(record['return']),
    'score': _finite_or_none(record['score']),
    'failure': record['failure'],
    'trained': bool(record['trained']),
    'invalid': sum(not step['valid'] for step in steps),
    'length': len(steps),
    'end': end['anchor'],
  }


def _step(
  step: dict[str, Any], earlier: Sequence[dict[str, Any]], decoder: _Decoder
) -> dict[str, Any]:
  """Returns what the page shows of a step, given the steps before it."""
  continued, size = _find_continued(step['prompt_ids'], earlier)
  calls = tool_calls.parse(step['response'])
  return (
    {name: step[name] for name in _TEXTS}
    | {name: bool(step[name]) for name in _FLAGS}
    | {name: _finite_or_none(step[name]) for name in _NUMBERS}
    | {
      'state': int(step['anchor_group']),
      'continues': continued,
      'messages': decoder.messages(step['prompt_ids'][size:]),
      'new_tokens': len(step['prompt_ids']) - size,
      'prompt_tokens': len(step['prompt_ids']),
      # JavaScript would round large integers, so values are JSON texts.
      'calls': [
        [call.name, {k: _shown(v) for k, v in call.arguments.items()}]
        for call in calls.calls
      ],
      'problem': calls.problem,
      'tokens': spans(
        decoder.piece,
        step['completion_ids'].tolist(),
        step['log_probs'].tolist(),
      ),
    }
  )


def _find_continued(
  ids: np.ndarray, earlier: Sequence[dict[str, Any]]
) -> tuple[int | None, int]:
  """Returns the earlier step that a prompt continues, and its tokens.

  A conversation's prompt begins with the prompt and the completion of its turn
  before, which is not the step before if conversations alternate.
  """
  for n in reversed(range(len(earlier))):
    parts = earlier[n]['prompt_ids'], earlier[n]['completion_ids']
    size = sum(map(len, parts))
    if np.array_equal(ids[:size], np.concatenate(parts)):
      return n, size
  return None, 0


def spans(
  decode: _Decode,
  ids: Sequence[int],
  log_probs: Sequence[float],
) -> list[tuple[str, float | None, int]]:
  """Returns (text, log-probability, number of tokens) of each span.

  A span is a token, or the tokens that together encode one character. A
  log-probability that is not finite, as after divergence, is None.
  """
  result, pending, total = [], [], 0.0
  for n, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True), 1):
    pending.append(token)
    total += log_prob
    text = decode(tuple(pending))
    complete = not text.endswith('\ufffd') or len(pending) == _CHARACTER_BYTES
    if complete or n == len(ids):
      result.append((text, _finite_or_none(total), len(pending)))
      pending, total = [], 0.0
  return result


def _finite_or_none(value: float) -> float | None:
  return round(float(value), 5) if math.isfinite(value) else None


def page(title: str, parts: dict[str, str] | None = None) -> str:
  """Returns the page as HTML.

  Args:
    title: title of the window.
    parts: data to embed, by path, each as returned by `_pack`. None: the
      page requests its data from the server.
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
    policy=_content_security_policy(texts),
    css=Markup(texts['css']),
    js=Markup(texts['js']),
    parts=parts or {},
  )


def _content_security_policy(texts: dict[str, str]) -> str:
  hashes = {
    name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    for name, text in texts.items()
  }
  return (
    f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    f"form-action 'none'; style-src 'sha256-{hashes['css']}'; "
    f"script-src 'sha256-{hashes['js']}'"
  )


def _pack(data: Any) -> str:
  """Returns JSON as base64 of gzip, which needs no escaping in HTML."""
  compressed = gzip.compress(_json(data).encode(), _GZIP_LEVEL, mtime=0)
  return base64.b64encode(compressed).decode()


def _shown(value: Any) -> str:
  """Returns the JSON text of an argument as a person reads it."""
  return json.dumps(value, ensure_ascii=False)


def _json(data: Any) -> str:
  """Returns JSON.

  Raises:
    ValueError: if a number is not finite; browsers cannot parse it.
  """
  return json.dumps(data, allow_nan=False)


def export(
  workdir: str | pathlib.Path,
  path: str | pathlib.Path,
  iterations: Iterable[int] = (),
) -> None:
  """Writes the page with all its data as one HTML file.

  Args:
    workdir: work directory of the run.
    path: path of the file.
    iterations: iterations whose episodes to include; empty: all iterations
      with stored episodes.

  Raises:
    ValueError: in one line, if the folder holds no run, the path is another
      file, an iteration was not kept, or the file would be too large for a
      browser.
  """
  if not _may_replace(pathlib.Path(path)):
    raise ValueError(
      f'--export={path}: exists and is no exported page; must be a new file or '
      'an earlier export'
    )
  run = summary(workdir)
  selected = sorted(set(iterations)) or run['iterations']
  for number in selected:
    if number not in run['iterations']:
      kept = ', '.join(map(str, run['iterations'])) or 'none'
      raise ValueError(
        f'--iterations={number}: its episodes were not kept; kept: {kept}'
      )
  run['iterations'] = selected
  parts, size = {'run': _pack(run)}, 0
  episode_sets = _episode_sets(pathlib.Path(workdir)) if selected else []
  decoders = [_make_decoder(episode_set) for episode_set in episode_sets]
  for number in tqdm.tqdm(selected, unit='iteration', disable=None):
    groups = []
    for episode_set, decoder in zip(episode_sets, decoders, strict=True):
      if number not in episode_set.iterations:
        continue
      for records in episode_set.groups(number):
        groups.append(_group(records))
        name = f'iterations/{number}/{groups[-1]["group"]}'
        parts[name] = _pack(_steps(records, decoder))
        size += len(parts[name])
    parts[f'iterations/{number}'] = _pack(_iteration(number, groups))
    if size > _MAX_EXPORT_BYTES:
      raise ValueError(
        f'--export={path}: exceeds {_MAX_EXPORT_BYTES >> 20} MiB at '
        f'iteration {number}; select fewer with --iterations'
      )
  try:
    files.write_atomic(pathlib.Path(path), page(run['name'], parts))
  except OSError as error:
    raise ValueError(
      f'--export={path}: cannot be written ({error.strerror}); must be a file '
      'in a writable folder with free space'
    ) from error


def _may_replace(path: pathlib.Path) -> bool:
  """Returns whether a path is free, or an earlier export."""
  if not path.is_file():
    return True  # A folder is refused when it is written.
  with path.open('rb') as file:
    start = file.read(1000)
  return not start or _GENERATOR in start


class _QuietHandler(serving.WSGIRequestHandler):
  """Handles requests without a log line for each."""

  def log_request(self, *args: object) -> None:
    """Writes nothing."""


def serve(
  workdir: str | pathlib.Path, host: str, port: int, names: Sequence[str] = ()
) -> None:
  """Prints the page's address and serves the page until interrupted.

  Args:
    workdir: work directory of the run.
    host: address to listen on; `::` and `0.0.0.0` listen on all addresses.
    port: port to listen on; 0: any free port.
    names: additional host names that requests may use, such as a proxy's.

  Raises:
    ValueError: in one line, if the folder holds no run or the port is in use.
  """
  summary(workdir)
  listening = web.listen(host, port)
  with listening:
    port = listening.getsockname()[1]
    server = serving.make_server(
      host,
      port,
      application(workdir, (host, *names)),
      threaded=True,
      request_handler=_QuietHandler,
      fd=listening.fileno(),
    )
  print(web.url(host, port), flush=True)
  server.serve_forever()


def application(
  workdir: str | pathlib.Path, names: Sequence[str] = ()
) -> flask.Flask:
  """Returns the Flask application that serves the page and its data.

  Args:
    workdir: work directory of the run.
    names: further host names to accept; see `web.check_host`.
  """
  app = flask.Flask(__name__, static_folder=None)
  app.before_request(lambda: web.check_host(names))

  @app.after_request
  def _harden(response):
    response.headers['X-Content-Type-Options'] = 'nosniff'
    return response

  @app.get('/')
  def _page():
    return page(pathlib.Path(workdir).resolve().name)

  @app.get('/run.json')
  def _run():
    return _json_response(summary(workdir))

  @app.get('/iterations/<int:number>.json')
  def _iteration_data(number: int):
    return _json_response(iteration(workdir, number))

  @app.get('/iterations/<int:number>/<int(signed=True):group>.json')
  def _group_data(number: int, group: int):
    return _json_response(steps(workdir, number, group))

  app.register_error_handler(Exception, _error_response)
  return app


def _error_response(error: Exception) -> flask.Response:
  """Returns the response to a failed request; the page shows its text."""
  if isinstance(error, exceptions.HTTPException):
    return _json_response({'error': error.description}, error.code or 500)
  if isinstance(error, KeyError):
    return _json_response(
      {'error': f'{error}: these episodes were not kept'}, 404
    )
  if isinstance(error, (ValueError, OSError)):
    return _json_response({'error': str(error)}, 500)
  flask.current_app.logger.error('a request failed', exc_info=error)
  return _json_response({'error': f'{type(error).__name__}: {error}'}, 500)


def _json_response(data: Any, status: int = 200) -> flask.Response:
  return flask.Response(_json(data), status, mimetype='application/json')
