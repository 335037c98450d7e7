"""A connection to an MCP server, for code that is not asynchronous.

All connections of a process share an event loop in a daemon thread. Every
failure of a server is a ConnectionError or a TimeoutError in one line: a server
that is down, ends, hangs, or breaks the protocol.
"""

import asyncio
import contextlib
import functools
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from envs import messages, tool_turns

# How the URL of a server starts.
URLS = ('http://', 'https://')
# How long to wait for a connection to close. The event loop ends a server that
# takes longer; other environments of the process need not wait for it.
_CLOSE_SECS = 1.0
_LOG_BYTES = 65_536  # Of the end of a log, for an error.
_MAX_LOG_BYTES = 2**24  # A longer log is emptied.


class Session:
  """An open connection to a server.

  Args:
    server: URL of a server, or a command that starts one and speaks MCP over
      its standard input and output. The command `python` is this interpreter.
    variables: names of environment variables that a command gets.
    timeout_secs: limit of a request, and of the start.

  Raises:
    ConnectionError: in one line, if the server cannot be used.
    TimeoutError: in one line, if it does not respond in time.
  """

  def __init__(
    self, server: str, *, variables: Sequence[str], timeout_secs: float
  ):
    self._server, self._variables = server, tuple(variables)
    self._timeout = timeout_secs
    # The server's log; its end explains why a server has ended.
    self._log = tempfile.TemporaryFile('a+b')  # noqa: SIM115
    self._ended: asyncio.Event
    self._client = None
    opened = asyncio.run_coroutine_threadsafe(self._start(), _loop())
    try:
      with self._one_line('start'):
        self._client = opened.result()
    except OSError:
      self._log.close()
      raise

  @property
  def instructions(self) -> str:
    """The server's instructions; '' if it has none."""
    return self._client.instructions or ''

  def list_tools(self) -> list[dict[str, Any]]:
    """Returns name, description and parameters of each tool."""
    with self._one_line('list of tools'):
      tools = self._run(self._list_tools())
    return [
      {
        'name': tool.name,
        'description': tool.description or '',
        'parameters': tool.input_schema,
      }
      for tool in tools
    ]

  def call(self, name: str, arguments: dict[str, Any]) -> tool_turns.Result:
    """Calls a tool; returns its texts, one a line."""
    with self._one_line(f'tool {name}'):
      result = self._run(self._client.call_tool(name, arguments))
    log = self._log.fileno()
    if os.fstat(log).st_size > _MAX_LOG_BYTES:
      os.lseek(log, 0, os.SEEK_SET)  # The server writes at this position.
      os.ftruncate(log, 0)
    texts = [
      part.text if part.type == 'text' else f'({part.type})'
      for part in result.content
    ]
    return tool_turns.Result('\n'.join(texts), result.is_error)

  def close(self) -> None:
    """Closes the connection and ends a server that it has started."""
    if self._client is not None:
      self._client = None
      _loop().call_soon_threadsafe(self._ended.set)
      with contextlib.suppress(TimeoutError):
        self._connection.result(_CLOSE_SECS)
    self._log.close()

  async def _start(self) -> Any:
    """Connects; returns the client."""
    loop = asyncio.get_running_loop()
    self._ended, ready = asyncio.Event(), loop.create_future()
    # A client is entered and left in the same task, as its library demands.
    self._connection = asyncio.run_coroutine_threadsafe(
      self._connect(ready), loop
    )
    return await ready

  async def _connect(self, ready: asyncio.Future) -> None:
    """Keeps the connection open until `_ended` is set."""
    import mcp

    try:
      async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(self._timeout):
          client = await stack.enter_async_context(
            mcp.Client(
              self._transport(), read_timeout_seconds=self._timeout, cache=None
            )
          )
        ready.set_result(client)
        await self._ended.wait()
    # The library raises groups of exceptions of many kinds.
    except BaseException as error:  # noqa: BLE001
      if not ready.done():
        ready.set_exception(error)

  def _transport(self) -> Any:
    import mcp
    from mcp.client import stdio

    if self._server.startswith(URLS):
      return self._server
    command, *args = shlex.split(self._server)
    variables = {v: os.environ[v] for v in self._variables if v in os.environ}
    command = sys.executable if command == 'python' else command
    parameters = mcp.StdioServerParameters(
      command=command, args=args, env=variables
    )
    return stdio.stdio_client(parameters, errlog=self._log)

  async def _list_tools(self) -> list[Any]:
    tools, cursor = [], None
    while True:
      page = await self._client.list_tools(cursor=cursor)
      tools += page.tools
      cursor = page.next_cursor
      if len(tools) > messages.MAX_TOOLS:
        raise ConnectionError(f'more than {messages.MAX_TOOLS} tools')
      if cursor is None:
        return tools

  def _run(self, request: Coroutine) -> Any:
    async def limited():
      async with asyncio.timeout(self._timeout):
        return await request

    return asyncio.run_coroutine_threadsafe(limited(), _loop()).result()

  @contextlib.contextmanager
  def _one_line(self, request: str) -> Iterator[None]:
    """Turns any failure of a request into an error in one line."""
    try:
      yield
    except Exception as error:
      cause = error
      while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
      if isinstance(cause, TimeoutError):
        raise TimeoutError(
          f'env.server={self._server}: {request}: no response within '
          f'{self._timeout:g} s'
        ) from None
      reason = messages.to_line(f'{cause}')[:300] or type(cause).__name__
      raise ConnectionError(
        f'env.server={self._server}: {request}: {reason}{self._last_words()}'
      ) from error

  def _last_words(self) -> str:
    """Returns the last line of the server's log, for an error."""
    if self._log.closed:
      return ''
    size = self._log.seek(0, os.SEEK_END)
    self._log.seek(max(0, size - _LOG_BYTES))
    lines = self._log.read().decode(errors='replace').split('\n')
    words = [messages.to_line(line)[:300] for line in lines if line.strip()]
    return f' (its log ends: {words[-1]})' if words else ''


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  """Returns the event loop of this process's connections."""
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, daemon=True).start()
  return loop
