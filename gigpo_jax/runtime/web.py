"""HTTP servers of this machine: addresses, names and connections."""

import ipaddress
import socket
from collections.abc import Iterable
from urllib import parse

import flask


def listen(host: str, port: int) -> socket.socket:
  """Returns a listening socket.

  werkzeug would end the process if the port were in use.

  Args:
    host: address to listen on; `::` and `0.0.0.0` listen on all addresses.
    port: port to listen on; 0: any free port.

  Raises:
    ValueError: in one line, if the address cannot be used.
  """
  try:
    return socket.create_server(
      (host, port),
      family=socket.AF_INET6 if ':' in host else socket.AF_INET,
      dualstack_ipv6=host == '::' and socket.has_dualstack_ipv6(),
    )
  except OSError as error:
    raise ValueError(
      f'--port={port}: cannot be used at {host} ({error.strerror}); choose '
      'another port, or --port=0 for any free port'
    ) from error


def url(host: str, port: int) -> str:
  """Returns the address of a server."""
  return f'http://{f"[{host}]" if ":" in host else host}:{port}/'


def is_trusted(header: str, names: Iterable[str]) -> bool:
  """Returns whether a Host header names this machine.

  Protects against DNS rebinding: a foreign web page can point its own domain at
  this machine's address and read the data. The browser still sends
  the foreign domain in the Host header. IP addresses cannot be rebound, so all
  of them are trusted.

  Args:
    header: value of the header, `NAME` or `NAME:PORT`.
    names: host names of this machine.
  """
  try:
    name = parse.urlsplit(f'//{header}').hostname or ''
  except ValueError:
    return False
  try:
    ipaddress.ip_address(name)
  except ValueError:
    return name.removesuffix('.') in {accepted.lower() for accepted in names}
  return True


def check_host(names: Iterable[str]) -> None:
  """Refuses a request whose Host header does not name this machine.

  Args:
    names: host names to accept in addition to `localhost` and this machine's
      own; see `is_trusted`.
  """
  header = flask.request.headers.get('Host', '')
  if not is_trusted(header, ('localhost', socket.gethostname(), *names)):
    flask.abort(
      400, f'Host {header}: not a name of this machine; add it with --names'
    )
