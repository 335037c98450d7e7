"""The HTTP server through which an agent harness plays episodes.

    POST /episodes                          the next episode: id, split, task
    POST /episodes/ID/v1/chat/completions   OpenAI's chat completions
    POST /v1/chat/completions               the same, with a header X-Episode
    POST /episodes/ID/reward                the reward, which ends the episode
    GET  /v1/models                         the only model, in a list
    GET  /v1/models/policy                  the only model

A Flask application serves an `endpoint.EndpointPool`. Requests need a token if
there is one, are JSON, and are limited in size and rate. Every error has the
form of OpenAI's API.
"""

import contextlib
import dataclasses
import functools
import hmac
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flask
from werkzeug import exceptions, serving

from envs import messages
from gigpo_jax import chat_completions, endpoint
from gigpo_jax.runtime import web

# Longest wait for an episode; a harness asks again after it.
_TAKE_SECS = 20.0
# Longest time in which a client may send a request, and then read the reply.
_IDLE_SECS = 60.0
# Connections beyond those of running episodes.
_EXTRA_CONNECTIONS = 64

# The name of the policy; requests may use any other.
MODEL = 'policy'
# Name of the `_Connection` of a request in its environ.
_CONNECTION = 'gigpo_jax.connection'
_MODEL_CARD = {'id': MODEL, 'object': 'model', 'created': 0, 'owned_by': MODEL}


class RateLimit:
  """Limits requests per second; short bursts of one second are allowed.

  Args:
    per_sec: the limit.
  """

  def __init__(self, per_sec: float):
    self._per_sec = per_sec
    self._left, self._last = per_sec, time.monotonic()
    self._lock = threading.Lock()

  def allows(self) -> bool:
    """Returns whether another request may be served now, and counts it."""
    with self._lock:
      now = time.monotonic()
      refill = (now - self._last) * self._per_sec
      self._left, self._last = min(self._per_sec, self._left + refill), now
      if self._left < 1:
        return False
      self._left -= 1
      return True


def application(
  pool: endpoint.EndpointPool,
  *,
  token: str = '',
  names: Sequence[str] = (),
  max_bytes: int = 8 << 20,
  max_requests_per_sec: float = 1000.0,
) -> flask.Flask:
  """Returns the Flask application.

  Args:
    pool: the episodes.
    token: what `Authorization: Bearer TOKEN` must hold; '' accepts everyone.
    names: further host names to accept; see `web.check_host`.
    max_bytes: maximum size of a request.
    max_requests_per_sec: maximum rate of requests of all clients.
  """
  app = flask.Flask(__name__, static_folder=None)
  # One more byte, because werkzeug cuts requests without a length there.
  app.config['MAX_CONTENT_LENGTH'] = max_bytes + 1
  rate = RateLimit(max_requests_per_sec)

  @app.before_request
  def _admit():
    web.check_host(names)
    given = flask.request.headers.get('Authorization', '')
    expected = f'Bearer {token}'
    # Before the rate, of which strangers must not use a part.
    if token and not hmac.compare_digest(given.encode(), expected.encode()):
      raise chat_completions.RequestError('wrong token', 401, 'no_access')
    _connection().is_admitted = True
    if not rate.allows():
      raise chat_completions.RequestError(
        f'more than {max_requests_per_sec:g} requests/s', 429, 'rate_limit'
      )

  @app.post('/episodes')
  def _take():
    # A browser needs permission to send JSON to another site.
    _body()
    episode = pool.take(_TAKE_SECS, _client())
    return episode or flask.Response(status=204)

  @app.post('/v1/chat/completions')
  @app.post('/episodes/<name>/v1/chat/completions')
  def _complete(name: str = ''):
    name = name or flask.request.headers.get('X-Episode', '')
    request = chat_completions.parse_request(_body())
    if not name:
      raise chat_completions.RequestError(
        'the header X-Episode is missing; must be the id of an episode, or use '
        '/episodes/ID/v1/chat/completions'
      )
    return pool.complete(name, request, _client())

  @app.post('/episodes/<name>/reward')
  def _reward(name: str):
    pool.reward(name, parse_reward(_body()), _client())
    return {}

  @app.get('/v1/models')
  @app.get('/episodes/<name>/v1/models')
  def _models(name: str = ''):
    del name
    return {'object': 'list', 'data': [_MODEL_CARD]}

  @app.get(f'/v1/models/{MODEL}')
  @app.get(f'/episodes/<name>/v1/models/{MODEL}')
  def _model(name: str = ''):
    del name
    return _MODEL_CARD

  app.teardown_request(_wait_for_client)
  app.register_error_handler(Exception, _error_response)
  return app


def parse_reward(body: Any) -> endpoint.Reward:
  """Returns the reward that a harness reports.

  Args:
    body: decoded JSON: reward, success, score and done.

  Raises:
    chat_completions.RequestError: if it is invalid.
  """
  names = {'reward', 'success', 'score', 'done'}
  if not isinstance(body, dict) or not body.keys() <= names:
    raise chat_completions.RequestError(
      'the body must be a JSON object with reward, success, score and done only'
    )
  values = {'success': False, 'done': True, 'score': None} | body
  for name in ('success', 'done'):
    if not isinstance(values[name], bool):
      raise chat_completions.RequestError(f'{name}: must be true or false')
  for name, bound in messages.BOUNDS.items():
    value = values.get(name)
    if name == 'score' and value is None:
      continue
    # `type` and not `isinstance`: a bool is an int.
    if type(value) not in (int, float) or not abs(value) <= bound:
      raise chat_completions.RequestError(
        f'{name}: must be a number within +-{bound:,.0f}'
      )
    values[name] = float(value)
  if not values['done'] and (values['success'] or values['score'] is not None):
    raise chat_completions.RequestError(
      'done=false: success and score belong to the whole episode; must be '
      'omitted before its last reward'
    )
  return endpoint.Reward(**values)


@contextlib.contextmanager
def serve(
  app: flask.Flask, listening: socket.socket, num_envs: int
) -> Iterator[None]:
  """Serves an application in threads.

  Args:
    app: the application.
    listening: the socket, from `web.listen`.
    num_envs: number of episodes that run at the same time, each of which may
      have a few connections.
  """
  host, port, *_ = listening.getsockname()
  server = _Server(host, port, app, _Handler, fd=listening.fileno())
  server.max_connections = 4 * num_envs + _EXTRA_CONNECTIONS
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


class _Handler(serving.WSGIRequestHandler):
  """Handles a connection; writes no log."""

  server: '_Server'
  timeout = _IDLE_SECS

  def make_environ(self) -> dict[str, Any]:
    connection = self.server.find(self.connection)
    return super().make_environ() | {_CONNECTION: connection}

  def log(self, *args: Any) -> None:
    """Does nothing; metrics count the episodes."""


@dataclasses.dataclass
class _Connection:
  """The state of a connection.

  Attributes:
    waits_since: since when the server waits for the client; None while the
      client waits.
    is_admitted: whether its request has the token.
  """

  waits_since: float | None = dataclasses.field(default_factory=time.monotonic)
  is_admitted: bool = False


class _Server(serving.ThreadedWSGIServer):
  """A server with a limit of connections, each of which has a thread.

  The timeout of a socket is for each read, so that a client could hold a
  connection with a byte per minute. This limits the sum.
  """

  daemon_threads = True
  max_connections = 0

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._lock = threading.Lock()
    self._connections: dict[socket.socket, _Connection] = {}  # Oldest first.

  def find(self, request: socket.socket) -> _Connection:
    """Returns the state of a connection."""
    return self._connections.get(request) or _Connection()

  def process_request(self, request: Any, client_address: Any) -> None:
    with self._lock:
      if len(self._connections) >= self.max_connections:
        items = self._connections.items()
        strangers = (key for key, c in items if not c.is_admitted)
        if oldest := next(strangers, None):
          self._drop(oldest)
      has_place = len(self._connections) < self.max_connections
      if has_place:
        self._connections[request] = _Connection()
    if has_place:
      super().process_request(request, client_address)
    else:
      self.shutdown_request(request)

  def shutdown_request(self, request: Any) -> None:
    with self._lock:
      self._connections.pop(request, None)
    super().shutdown_request(request)

  def service_actions(self) -> None:
    """Ends connections whose clients are too slow; called twice a second."""
    start = time.monotonic() - _IDLE_SECS
    with self._lock:
      for request, connection in list(self._connections.items()):
        since = connection.waits_since
        if since is not None and since < start:
          self._drop(request)

  def _drop(self, request: socket.socket) -> None:
    """Ends a connection; its thread, which waits for the client, closes it."""
    del self._connections[request]
    with contextlib.suppress(OSError):  # The client has left.
      request.shutdown(socket.SHUT_RDWR)


def _connection() -> _Connection:
  """Returns the connection of the request."""
  return flask.request.environ.get(_CONNECTION) or _Connection()


def _wait_for_client(error: BaseException | None) -> None:
  """Notes that the client has to read the reply."""
  del error
  _connection().waits_since = time.monotonic()


def _client() -> Callable[[], bool]:
  """Returns a function of whether the client of the request has not left."""
  connection = flask.request.environ['werkzeug.socket']
  return functools.partial(_is_connected, connection)


def _is_connected(connection: socket.socket) -> bool:
  """Returns whether a client has not closed its connection."""
  poll = select.poll()
  poll.register(connection, select.POLLIN)
  try:
    return not poll.poll(0) or bool(connection.recv(1, socket.MSG_PEEK))
  except OSError:
    return False


def _body() -> Any:
  """Returns the JSON of a request.

  Raises:
    chat_completions.RequestError: if it is too large or too deep.
    exceptions.HTTPException: if it is invalid.
  """
  limit = flask.current_app.config['MAX_CONTENT_LENGTH'] - 1
  try:
    if len(flask.request.get_data()) > limit:
      raise exceptions.RequestEntityTooLarge
    _connection().waits_since = None
    return flask.request.get_json()
  except RecursionError as error:
    raise chat_completions.RequestError('the JSON is too deep') from error
  except exceptions.RequestEntityTooLarge as error:
    raise chat_completions.RequestError(
      f'the request has more than {limit:,} bytes, the limit of '
      '--max_request_mib',
      413,
      'too_large',
    ) from error


def _error_response(error: Exception) -> tuple[dict[str, Any], int]:
  """Returns the response to a failed request."""
  if isinstance(error, chat_completions.RequestError):
    return _error(str(error), error.code), error.status
  if isinstance(error, exceptions.HTTPException):
    message, code = error.description or '', error.code or 500
    if isinstance(error, (exceptions.NotFound, exceptions.MethodNotAllowed)):
      request = flask.request
      message = (
        f'{request.method} {request.path[:80]!r}: unknown; must be one of '
        f'{", ".join(_requests())}'
      )
    return _error(message, error.name), code
  flask.current_app.logger.error('a request failed', exc_info=error)
  return _error(f'{type(error).__name__}: {error}', 'internal'), 500


def _requests() -> list[str]:
  """Returns the methods and paths of the application."""
  return sorted(
    f'{method} {rule.rule}'.replace('<name>', 'ID')
    for rule in flask.current_app.url_map.iter_rules()
    for method in rule.methods - {'HEAD', 'OPTIONS'}
  )


def _error(message: str, code: str) -> dict[str, Any]:
  kind = 'invalid_request_error'
  return {'error': {'message': message, 'type': kind, 'code': code}}
